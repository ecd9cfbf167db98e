"""The heartbeat of a process: a counter that moves on every piece of work done in it.

A wait in the same process, or a health check from outside, compares two readings. Code that only waits must not beat.
"""

from __future__ import annotations

from pathlib import Path

IO_STEP = 64 * 2**20  # bytes; idle threads of Ray and gloo read and write less in an hour
_count = 0


def beat() -> None:
    """Count a piece of work."""
    global _count
    # two threads that beat at once may count as one
    _count += 1


def beats() -> int:
    """The counter."""
    return _count


def pulse() -> tuple[int, int]:
    """The counter, and the bytes that this process has read and written: loading a large checkpoint is progress too."""
    return _count, (bytes_moved("self") or 0) // IO_STEP


def bytes_moved(process: int | str) -> int | None:
    """Bytes that a process has read and written; None if the system does not say."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except OSError:
        return None
    known = dict(line.split(": ") for line in lines)
    return sum(int(known.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))
