"""A pool of CPU processes for user code that may hang or crash.

Owns the outcome of each call, and which process makes it. Knows nothing of what is called. A process is replaced when it
dies, idle or at work, or when its call passes its deadline; other calls are not affected.
"""

from __future__ import annotations

import asyncio
import atexit
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from millrace.connectors.user_code.process import (
    NO_LIMITS,
    START_TIMEOUT_S,
    Limits,
    TooManyProcessesError,
    WorkerDiedError,
    WorkerProcess,
)
from millrace.core.errors import MillraceError
from millrace.core.plain_text import printable

STARTS = 3  # new processes that may die before they start a call


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call: a value, or the reason for its absence."""

    kind: Literal["done", "failed", "timed_out", "died"]
    value: Any = None
    reason: str | None = None


class WorkerPool:
    """Makes picklable calls of module-level functions in killable processes, `workers` at a time.

    A thread waits for each process. Processes start when first needed.
    """

    def __init__(self, workers: int, limits: Limits = NO_LIMITS) -> None:
        """limits: for each process."""
        self._limits = limits
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="millrace-worker")
        self._lock = threading.Lock()  # guards the fields below
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._closed = False
        # without this, Python's exit waits for idle processes
        atexit.register(self.close)

    async def call(
        self, function: Callable[..., Any], *args: Any, timeout_s: float, again: int = 0
    ) -> Outcome:
        """Make one call. An error in it is an outcome, not raised.

        timeout_s: counts from when a process starts the call.
        again: how often the call is retried if a signal kills its process, such as the kernel's when memory runs out.
        Errors: MillraceError if no process can be started.
        """
        call = _Call(function, args, timeout_s)
        future = asyncio.get_running_loop().run_in_executor(self._threads, self._outcome, call, again)
        try:
            return await future
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def warm(self) -> None:
        """Return when one process is ready for the first call; the others start when calls need them."""
        await self.call(abs, 0, timeout_s=START_TIMEOUT_S)

    def close(self) -> None:
        """Stop all processes at once."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            for worker in self._all:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.close()
        self._all.clear()
        self._idle.clear()

    def _outcome(self, call: _Call, again: int) -> Outcome:
        """Runs in a thread: find or start a process, send it the call, and wait for the answer."""
        try:
            pickled = bytes(ForkingPickler.dumps((call.function, call.args)))
        except Exception as error:  # noqa: BLE001 - arguments that cannot be pickled raise anything
            return Outcome("failed", reason=printable(f"{type(error).__name__}: {error}"))
        outcome, signalled = self._attempt(call, pickled)
        while signalled and again and not call.cancelled:
            outcome, signalled = self._attempt(call, pickled)
            again -= 1
        return outcome

    def _attempt(self, call: _Call, pickled: bytes) -> tuple[Outcome, bool]:
        """Make the call in a process, and keep the process for the next call if it survives.

        The second value says whether a signal killed the process during the call.
        """
        worker = self._begun(call, pickled)
        if worker is None:
            return Outcome("died", reason=f"{STARTS} worker processes died before the call began"), False
        try:
            answer = worker.answer(call.timeout_s)
        except WorkerDiedError as error:
            self._discard(call, worker)
            return Outcome("died", reason=str(error)), error.signalled
        except TooManyProcessesError as error:
            self._discard(call, worker)
            return Outcome("died", reason=str(error)), False
        if answer is None:
            self._discard(call, worker)
            return Outcome("timed_out", reason=f"no answer within {call.timeout_s:g} s"), False
        call.release()
        with self._lock:
            self._idle.append(worker)
        try:
            kind, value = pickle.loads(answer)  # noqa: S301 - from our child process
        except Exception as error:  # noqa: BLE001 - results that cannot be unpickled raise anything
            return Outcome("failed", reason=printable(f"{type(error).__name__}: {error}")), False
        return (Outcome("done", value) if kind == "done" else Outcome("failed", reason=value)), False

    def _begun(self, call: _Call, pickled: bytes) -> WorkerProcess | None:
        """A process that has started the call. Processes that died while idle are replaced, any number of them."""
        fresh = 0
        while fresh < STARTS and not call.cancelled:
            worker, is_new = self._take()
            fresh += is_new
            if call.hold(worker) and worker.begins(pickled):
                return worker
            self._discard(call, worker)
        return None

    def _take(self) -> tuple[WorkerProcess, bool]:
        """An idle process or a new one, and whether it is new."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if self._idle:
                return self._idle.pop(), False
            try:
                worker = WorkerProcess(self._limits)
            except OSError as error:
                raise MillraceError(
                    f"no worker process could be started: {error}",
                    where="reward.workers",
                    remedy="free memory or processes on this host, or lower reward.workers, and start the same command again",
                ) from error
            self._all.add(worker)
            return worker, True

    def _discard(self, call: _Call, worker: WorkerProcess) -> None:
        call.release()
        with self._lock:
            self._all.discard(worker)
            worker.close()


class _Call:
    """A call in progress: held by a process, or cancelled."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> None:
        self.function = function
        self.args = args
        self.timeout_s = timeout_s
        self.cancelled = False
        self._worker: WorkerProcess | None = None
        self._lock = threading.Lock()

    def hold(self, worker: WorkerProcess) -> bool:
        """Record the process that makes the call; False if the call was cancelled before."""
        with self._lock:
            self._worker = None if self.cancelled else worker
            return not self.cancelled

    def release(self) -> None:
        """Record that the process has answered, or is lost."""
        with self._lock:
            self._worker = None

    def cancel(self) -> None:
        """Cancel the call, and kill the process that makes it, if any."""
        with self._lock:
            self.cancelled = True
            if self._worker:
                self._worker.kill()
