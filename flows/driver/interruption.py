"""Ctrl-C and SIGTERM: a command ends within seconds wherever it is, and says how to go on.

The command's work runs in a thread, and the main thread only waits for it. Python runs signal handlers in the main thread, so
they run at once whatever the work does, and never in the middle of it. Prefect, whose own handler of SIGTERM raises, installs
none where a flow runs in another thread.

A flow says by `on_signal` what is to happen then. Nothing is waited for longer than DEADLINE_S: what is written is whole or
absent at any moment, as after `kill -9`. Under a Prefect worker there is no command; Prefect cancels the flow's task itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Generic, NoReturn, TypeVar

T = TypeVar("T")

DEADLINE_S = 8.0
REPORT_S = 2.0  # for Prefect to note that its runs ended
POLL_S = 0.2
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_reactions: list[tuple[asyncio.AbstractEventLoop, Callable[[], object]]] = []


@contextlib.contextmanager
def on_signal(react: Callable[[], object]) -> Iterator[None]:
    """Within, the command's first signal calls `react` in the running event loop, in the order of registration."""
    entry = (asyncio.get_running_loop(), react)
    _reactions.append(entry)
    try:
        yield
    finally:
        _reactions.remove(entry)


def run_interruptibly(work: Callable[[], T]) -> T:
    """Do `work` in a thread and return its result. On Ctrl-C or SIGTERM this process ends, with 130 or 143.

    The first signal calls what `on_signal` registered and waits until no flow has anything left to do, at most DEADLINE_S.
    Where nothing is registered, and at a second Ctrl-C, the process ends at once. A signal that the process ignored before
    stays ignored. Call it in the main thread.
    """
    work_thread = _WorkThread(work)
    command = _Command()
    taken = [number for number in NAMES if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, command.on_signal) for number in taken}
    try:
        work_thread.start()
        while not work_thread.ended.wait(POLL_S):
            for number in taken:
                signal.signal(number, command.on_signal)  # Ray puts its own in place when a process joins
            command.leave_if_cleaned_up()
        if command.interrupted_by is not None:
            command.leave()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return work_thread.result()


class _WorkThread(threading.Thread, Generic[T]):
    """Does the work. Ctrl-C, which a terminal sends to all its processes, is blocked for what it starts: they end with it."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(name="work", daemon=True)
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        """Do the work and keep its result or error."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._error = error
        finally:
            self.ended.set()

    def result(self) -> T:
        """The result, or the error raised again."""
        if self._error is not None:
            raise self._error
        return self._results[0]


class _Command:
    """What the signals of one command did so far."""

    def __init__(self) -> None:
        self.interrupted_by: signal.Signals | None = None
        self._cleaned_up: float | None = None  # when

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """The handler of both signals."""
        if self.interrupted_by is not None:
            if number == signal.SIGINT:
                self.leave("Ended at once: processes of the run may be left.")
            return
        self.interrupted_by = signal.Signals(number)
        signal.alarm(0)  # by which Ray's handler, if it was in place, aborts the process in 3 s
        logging.disable(logging.CRITICAL)  # Prefect logs as errors that its runs are cancelled
        if not _reactions:
            self.leave()
        _say(f"{NAMES[self.interrupted_by]}: the run ends; Ctrl-C again ends it at once.")
        for loop in {loop for loop, _ in _reactions}:
            loop.call_soon_threadsafe(_react, loop)
        timer = threading.Timer(
            DEADLINE_S,
            self.leave,
            [f"Not all had ended in {DEADLINE_S:g} s: processes of the run may be left."],
        )
        timer.daemon = True
        timer.start()

    def leave_if_cleaned_up(self) -> None:
        """End this process where no flow has anything left to do. A thread in a long call is not waited for."""
        if self.interrupted_by is None or _reactions:
            self._cleaned_up = None
            return
        self._cleaned_up = self._cleaned_up or time.monotonic()
        if time.monotonic() - self._cleaned_up > REPORT_S:
            self.leave()

    def leave(self, problem: str = "") -> NoReturn:
        """Say how to go on, and end this process without waiting for any thread."""
        assert self.interrupted_by is not None
        again = shlex.join(["millrace", *sys.argv[1:]])
        if problem:
            _say(f"{problem} `millrace stop RUN` ends them.")
        _say(
            f"Ended by {NAMES[self.interrupted_by]}; what finished is kept. The same command goes on: {again}"
        )
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        os._exit(128 + self.interrupted_by)


def _react(loop: asyncio.AbstractEventLoop) -> None:
    """Call all that a loop's flows registered, before any of them goes on."""
    for registered_in, react in list(_reactions):
        if registered_in is loop:
            react()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
