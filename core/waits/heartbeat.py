"""The heartbeat of a process: a counter that moves whenever something gets done in it.

Who waits in the same process, or asks it how it is, compares two readings. What only waits must not beat.
"""

from __future__ import annotations

from pathlib import Path

IO_STEP = 64 * 2**20  # bytes; what idle threads of Ray and gloo read and write in an hour is less
_count = 0


def beat() -> None:
    """Something got done."""
    global _count
    _count += 1  # two threads that beat at once may count as one


def beats() -> int:
    """The counter."""
    return _count


def pulse() -> tuple[int, int]:
    """The counter, and how much this process has read and written: loading a large checkpoint is progress too."""
    return _count, (bytes_moved("self") or 0) // IO_STEP


def bytes_moved(process: int | str) -> int | None:
    """Bytes that a process has read and written; None where the system does not say."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except OSError:
        return None
    known = dict(line.split(": ") for line in lines)
    return sum(int(known.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))
