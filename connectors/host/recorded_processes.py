"""Finds processes that were recorded in a file of MILLRACE_HOME, such as a local server.

Owns how such a file is read, and whether a process is the recorded one. Knows nothing of what else the record holds.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from millrace.core.errors import MillraceError


def read_record(path: Path) -> bytes | None:
    """The content of a record's file, None if the file does not exist. Raises MillraceError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MillraceError(
            f"cannot be read: {error.strerror}", where=str(path), remedy="remove it, and start again"
        ) from error


def find_process(pid: int, created: float) -> psutil.Process | None:
    """The process of this pid if it was created at the recorded time, else None. `created`: seconds since the epoch."""
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < 1 else None
    except psutil.NoSuchProcess:
        return None


def is_alive(pid: int, created: float) -> bool:
    """Whether the recorded process lives. A zombie does not."""
    process = find_process(pid, created)
    try:
        return process is not None and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send_signal(process: psutil.Process, number: int) -> None:
    """Send a signal, unless the process has ended."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
