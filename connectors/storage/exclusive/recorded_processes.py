"""Processes that a file in MILLRACE_HOME records: the only server of its kind that a home has.

Owns how such a file is read, and whether a process is the one that was recorded. Knows nothing of what the record holds.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from millrace.core.errors import MillraceError


def read_record(path: Path) -> bytes | None:
    """The content of a record's file, None if there is none. Raises MillraceError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MillraceError(
            f"cannot be read: {error.strerror}", where=str(path), remedy="remove it, and start again"
        ) from error


def find_process(pid: int, created: float) -> psutil.Process | None:
    """The process of a pid, if it is the one that was recorded. `created`: seconds since the epoch."""
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < 1 else None
    except psutil.NoSuchProcess:
        return None


def is_alive(pid: int, created: float) -> bool:
    """Whether the recorded process lives. One that has ended and waits for its parent does not."""
    process = find_process(pid, created)
    try:
        return process is not None and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send_signal(process: psutil.Process, number: int) -> None:
    """Send a signal, if the process is still there."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
