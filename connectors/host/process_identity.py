"""The identity of a process, and whether that process lives: exact on the same kernel, unknown from another.

Owns when two processes are the same: equal boot, PID namespace, pid and start time. A pid alone is reused, containers may share
a host's name, and a start time by the wall clock moves with the clock. Knows nothing of leases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
from pydantic import BaseModel

from millrace.core.errors import MillraceError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = ("pid", "time")
GONE = ("Z", "X", "x")  # states of a process that has ended
LOOK_S = 0.02  # seconds between looks at processes that are waited for


class ProcessIdentity(BaseModel):
    """One process of one boot of one machine. Equal identities are the same process."""

    host: str  # for messages only
    boot: str
    namespaces: str
    pid: int
    started: float  # Linux: clock ticks since the boot; elsewhere the kernel's seconds since the epoch

    @classmethod
    def own(cls) -> ProcessIdentity:
        """The identity of the calling process."""
        pid = os.getpid()
        started = _started("self") if sys.platform == "linux" else psutil.Process(pid).create_time()
        assert started is not None, "a running process has a start"
        return cls(
            host=socket.gethostname(), boot=_boot(), namespaces=_namespaces(), pid=pid, started=started
        )

    def lives(self) -> bool | None:
        """Whether the process lives. None if this process cannot know: on another machine, boot or PID namespace."""
        if (self.boot, self.namespaces) != (_boot(), _namespaces()):
            return None
        if not _pid_exists(self.pid):
            return False
        if sys.platform != "linux":
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1
        if os.readlink("/proc/self") != str(os.getpid()):
            return None  # here /proc shows another namespace's processes
        started = _started(str(self.pid))
        if started is not None:
            return started == self.started
        return None if _pid_exists(self.pid) and not _is_gone(str(self.pid)) else False

    def send_signal(self, number: int) -> bool:
        """Send a signal to exactly this process; False if it has ended, or the caller cannot know whether it lives.

        Raises PermissionError for another user's process.
        """
        try:
            # holds the process, so that a reused pid cannot get the signal
            with _held(self.pid) as send:
                if not self.lives():
                    return False
                send(number)
        # newer kernels say "no such file" of a process that has ended and is not reaped
        except (ProcessLookupError, FileNotFoundError):
            return False
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextlib.contextmanager
def _held(pid: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that signals the process that has this pid now, even if the pid is reused. Not so outside Linux."""
    if sys.platform != "linux":
        yield lambda number: os.kill(pid, number)
        return
    handle = os.pidfd_open(pid)
    try:
        yield lambda number: signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def _boot() -> str:
    """An id of this machine's current boot."""
    if BOOT_ID.exists():
        return BOOT_ID.read_text().strip()
    return f"{socket.gethostname()} since {psutil.boot_time():.0f}"


def _namespaces() -> str:
    """The namespaces that this process's pid and start time belong to; "" if the system has none."""
    links = [Path("/proc/self/ns") / name for name in NAMESPACES]
    return " ".join(os.readlink(link) for link in links if link.exists())


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True


def _started(process: str) -> float | None:
    """Start time of a process in /proc, in clock ticks since the boot; None if it has ended or is hidden."""
    fields = _stat(process)
    return float(fields[19]) if fields and fields[0] not in GONE else None


def _is_gone(process: str) -> bool:
    fields = _stat(process)
    return bool(fields) and fields[0] in GONE


def _stat(process: str) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if the process does not exist or is hidden."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


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
    return process is not None and _runs(process)


def send_signal(process: psutil.Process, number: int) -> None:
    """Send a signal, unless the process has ended."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def wait_ended(processes: Iterable[psutil.Process], timeout_s: float) -> set[psutil.Process]:
    """Wait until processes end, at most so many seconds; returns those that live still. A zombie has ended.

    Not psutil's wait, which fails on newer kernels if a process ends between its two looks.
    """
    until = time.monotonic() + timeout_s
    living = {process for process in processes if _runs(process)}
    while living and time.monotonic() < until:
        time.sleep(LOOK_S)
        living = {process for process in living if _runs(process)}
    return living


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
