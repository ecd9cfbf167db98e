"""One worker process: how it receives calls, answers, and dies.

Owns the process and its pipe. Knows nothing of what calls do, of waiting calls, or of other processes.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from millrace.connectors.host.own_addresses import reach_own_directly
from millrace.core.errors import described
from millrace.core.plain_text import take_any_text

START_TIMEOUT_S = 120.0  # for a process to report that it is ready, and to unpickle a call
# How often to check that a process lives. The pipe alone does not tell: a child of the process may hold its end open
CHECK_S = 0.5
EXIT_S = 5.0  # from the end of the pipe to the end of the process
READY, BEGINS = b"ready", b"begins"
PR_SET_PDEATHSIG = 1
# multiprocessing keeps one list of children for all threads, and reads it when a process starts
_starting_or_closing = threading.Lock()


class TooManyProcessesError(Exception):
    """A call ran more processes than it may."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it started more than {most} processes (reward.max_processes)")


class WorkerDiedError(Exception):
    """The process ended, or closed its pipe, in a call. `signalled`: a signal ended it."""

    def __init__(self, reason: str, signalled: bool) -> None:
        super().__init__(reason)
        self.signalled = signalled


@dataclass(frozen=True)
class Limits:
    """What a worker process may use. None: as much as there is."""

    memory_mb: int | None = None  # an allocation beyond it raises MemoryError in the call
    max_processes: int | None = None  # processes that a call may run at once; with more the worker is killed


NO_LIMITS = Limits()


class WorkerProcess:
    """A process that makes one call after another. Used by one thread at a time, except for `kill`."""

    def __init__(self, limits: Limits = NO_LIMITS) -> None:
        context = multiprocessing.get_context("spawn")
        self._limits = limits
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, limits.memory_mb), name="millrace-worker"
        )
        try:
            with _starting_or_closing:
                self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()

    def begins(self, call: bytes) -> bool:
        """Send a pickled call, and return whether the process started it. False if it died or hangs; the call then has not run."""
        try:
            # a short message first: sending a long call to a process that hangs would block
            self._pipe.send_bytes(READY)
            if self._receive(START_TIMEOUT_S) != READY:
                return False
            self._pipe.send_bytes(call)
            return self._receive(START_TIMEOUT_S) == BEGINS
        except (EOFError, OSError):
            return False

    def answer(self, timeout_s: float) -> bytes | None:
        """The pickled answer to the call that it started; None after the timeout.

        Errors: WorkerDiedError.
        """
        try:
            return self._receive(timeout_s)
        except (EOFError, OSError):
            raise self._death() from None

    def kill(self) -> None:
        """Kill it and all processes that it started, even in other sessions."""
        if self._process.is_alive():
            kill_with_descendants(self._process.pid or 0)
            self._process.kill()

    def close(self) -> None:
        """Kill it, and close its descriptors."""
        self.kill()
        self._process.join()
        with _starting_or_closing:
            self._process.close()
        self._pipe.close()

    def _receive(self, timeout_s: float) -> bytes | None:
        """The next message; None after the timeout. Errors: EOFError or OSError if the process is gone."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            if self._pipe.poll(min(max(left, 0.0), CHECK_S)):
                return self._pipe.recv_bytes()
            if left <= 0:
                return None
            most = self._limits.max_processes
            if most is not None and len(processes_of(self._process.pid or 0)) > most + 1:
                self.kill()
                raise TooManyProcessesError(most)
            if not self._process.is_alive() and not self._pipe.poll():
                raise EOFError

    def _death(self) -> WorkerDiedError:
        code = self._exit_code()
        if code is None:
            return WorkerDiedError("the worker process closed its connection", signalled=False)
        if code < 0:
            return WorkerDiedError(
                f"the worker process died of signal {-code} ({signal.strsignal(-code)})", signalled=True
            )
        return WorkerDiedError(f"the worker process ended itself with exit code {code}", signalled=False)

    def _exit_code(self) -> int | None:
        """Wait for the process to exit. None if it still runs.

        Another thread that starts a process may reap this one; `join` returns without an exit code until that thread
        has stored it.
        """
        deadline = time.monotonic() + EXIT_S
        while (code := self._process.exitcode) is None and (left := deadline - time.monotonic()) > 0:
            self._process.join(left)
            time.sleep(0.005)
        return code


def _serve(pipe: Connection, memory_mb: int | None) -> None:
    """Runs in the worker: make one call after another, until the pipe closes."""
    detach()
    if memory_mb is not None:
        limit_memory(memory_mb)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            pipe.recv_bytes()
            pipe.send_bytes(READY)
            answer = _Call(pipe.recv_bytes())
            pipe.send_bytes(BEGINS)
            pipe.send_bytes(answer.make())


class _Call:
    """A call in the worker. Any exception of user code, also SystemExit, is sent as text: it may not unpickle in the driver."""

    def __init__(self, pickled: bytes) -> None:
        self._problem = ""
        try:
            self._function, self._args = pickle.loads(pickled)  # noqa: S301 - from the parent process
        except BaseException as error:  # noqa: BLE001 - unpickling imports modules of the user
            self._problem = described(error)

    def make(self) -> bytes:
        """Make the call, and return a pickled pair: "done" and the value, or "failed" and the reason."""
        if self._problem:
            return pickle.dumps(("failed", self._problem))
        try:
            return pickle.dumps(("done", self._function(*self._args)))
        except BaseException as error:  # noqa: BLE001 - kept with its sample
            return pickle.dumps(("failed", described(error)))


def limit_memory(megabytes: int) -> None:
    """Limit this process's address space, so that a larger allocation raises MemoryError in the call."""
    limit = megabytes << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def processes_of(leader: int) -> set[int]:
    """The processes of a session, by its leader, and all their descendants. Empty if the system has no /proc.

    A descendant that started a new session is not found once its parent has ended: nothing names its origin.
    """
    return _below(leader, _process_table())


def _below(leader: int, table: dict[int, tuple[int, int]]) -> set[int]:
    found = {pid for pid, (_, session) in table.items() if session == leader}
    while below := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= below
    return found


def _process_table() -> dict[int, tuple[int, int]]:
    """Parent and session of each process. Empty if the system has no /proc."""
    table: dict[int, tuple[int, int]] = {}
    if not os.path.isdir("/proc/self"):  # not Linux
        return table
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                status = Path("/proc", name, "stat").read_text(errors="replace")
                _, parent, _, session = status.rpartition(")")[2].split()[:4]
                table[int(name)] = int(parent), int(session)
    return table


def kill_with_descendants(leader: int) -> None:
    """Kill the group that a child of this process leads or led, and its descendants outside the group."""
    table = _process_table()
    parent, _ = table.get(leader, (os.getpid(), leader))
    if parent != os.getpid():
        return  # the child was waited for, and the kernel gave its number to a stranger
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it does not lead a group yet
        os.killpg(leader, signal.SIGKILL)
    for pid in _below(leader, table) - {leader}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def detach() -> None:
    """Run in a worker process: leave the parent's signals and process group, but end with the parent."""
    # Ctrl-C reaches every process of the terminal, and the driver decides when workers stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # a new group, so that a kill reaches all that a call started
    os.setsid()
    _die_with_parent()
    reach_own_directly()
    take_any_text()  # what user code prints


def _die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Outside Linux, only the pipe closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent: Any = multiprocessing.parent_process()
        if os.getppid() != parent.pid:
            os._exit(1)
