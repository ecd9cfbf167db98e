"""Ctrl-C and SIGTERM: a command ends within seconds at any point, and says how to resume.

The command's work runs in a thread, and the main thread only waits for it. Python runs signal handlers in the main thread, so
they run at once, and never interrupt the work's own code. Prefect, whose handler of SIGTERM raises, installs none if a flow
runs in another thread.

A flow registers its reaction by `on_signal`. No wait is longer than DEADLINE_S: files are whole or absent at any moment, as
after `kill -9`. Under a Prefect worker there is no command; Prefect cancels the flow's task itself.

Log lines of libraries while the command ends, such as that runs were cancelled, go where its Terminal sends them.
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
from pathlib import Path
from types import FrameType
from typing import Generic, NoReturn, Protocol, TypeVar

from millrace.core.plain_text import write_line

T = TypeVar("T")

DEADLINE_S = 8.0
REPORT_S = 2.0  # time for Prefect to note that its runs ended
POLL_S = 0.2
PATIENCE_S = 4.0  # the command then says that it is ending
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_reactions: list[tuple[asyncio.AbstractEventLoop, Callable[[], object]]] = []
_commands: list[_Command] = []


class LastWords(Protocol):
    """The output for a command's last words."""

    def silence(self) -> None:
        """Keep everything but last words from it from now on."""

    def say(self, line: str) -> None:
        """Print last words."""

    def log(self) -> Path | None:
        """The file with the text kept off it since `silence`, if there is any."""


class _OfPython:
    """The stderr of a command without a log: lines logged while it ends are dropped."""

    def silence(self) -> None:
        logging.disable(logging.CRITICAL)

    def say(self, line: str) -> None:
        write_line(line, sys.stderr)

    def log(self) -> Path | None:
        return None


@contextlib.contextmanager
def on_signal(react: Callable[[], object]) -> Iterator[None]:
    """Within the block, the command's first signal calls `react` in the running event loop, in the order of registration."""
    entry = (asyncio.get_running_loop(), react)
    _reactions.append(entry)
    try:
        yield
    finally:
        _reactions.remove(entry)


def in_command() -> bool:
    """Whether `run_interruptibly` does its work in this process: a command, which reports errors at its end."""
    return bool(_commands)


def interrupted_by() -> str | None:
    """The signal that ends this process's command: `Ctrl-C` or `SIGTERM`; None without one."""
    for command in _commands:
        if command.interrupted_by is not None:
            return NAMES[command.interrupted_by]
    return None


def run_interruptibly(work: Callable[[], T], terminal: LastWords | None = None) -> T:
    """Do `work` in a thread and return its result. On Ctrl-C or SIGTERM this process ends, with 130 or 143.

    The first signal calls the functions registered by `on_signal` and waits until no flow has work left, at most DEADLINE_S. If
    none is registered, and at a second Ctrl-C, the process ends at once. A signal that the process ignored before
    stays ignored. Call it in the main thread.
    """
    work_thread = _WorkThread(work)
    command = _Command(terminal or _OfPython())
    _commands.append(command)
    taken = [number for number in NAMES if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, command.on_signal) for number in taken}
    try:
        work_thread.start()
        while not work_thread.ended.wait(POLL_S):
            for number in taken:
                # Ray installs its own handlers when a process joins a cluster
                signal.signal(number, command.on_signal)
            command.leave_if_cleaned_up()
            command.say_that_it_ends()
        if command.interrupted_by is not None:
            command.leave()
    finally:
        _commands.remove(command)
        for number, handler in before.items():
            signal.signal(number, handler)
    return work_thread.result()


class _WorkThread(threading.Thread, Generic[T]):
    """Does the work. Its child processes ignore Ctrl-C, which a terminal sends to all processes: they end with this process."""

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
        """The result; raises the error of the work."""
        if self._error is not None:
            raise self._error
        return self._results[0]


class _Command:
    """State of one command after signals."""

    def __init__(self, terminal: LastWords) -> None:
        self.interrupted_by: signal.Signals | None = None
        self._terminal = terminal
        self._told = False  # whether the user was told that it ends
        self._since = 0.0  # time of the interruption
        self._cleaned_up: float | None = None  # time when the flows had ended

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """The handler of both signals."""
        if self.interrupted_by is not None:
            if number == signal.SIGINT:
                self.leave("Ended at once: processes of the run may be left.")
            return
        self.interrupted_by, self._since = signal.Signals(number), time.monotonic()
        # cancel the alarm by which Ray's handler, if it ran first, would abort the process in 3 s
        signal.alarm(0)
        # Prefect logs cancelled runs as errors
        self._terminal.silence()
        if not _reactions:
            self.leave()
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
        """End this process if no flow has work left. Does not wait for a thread in a long call."""
        if self.interrupted_by is None or _reactions:
            self._cleaned_up = None
            return
        self._cleaned_up = self._cleaned_up or time.monotonic()
        if time.monotonic() - self._cleaned_up > REPORT_S:
            self.leave()

    def say_that_it_ends(self) -> None:
        """Say once that the command is ending, if that takes long: users would press Ctrl-C again, which leaves processes."""
        if self.interrupted_by and not self._told and time.monotonic() - self._since > PATIENCE_S:
            self._told = True
            self._terminal.say(f"{NAMES[self.interrupted_by]}: the run ends; Ctrl-C again ends it at once.")

    def leave(self, problem: str = "") -> NoReturn:
        """Say how to resume, and end this process without waiting for any thread."""
        assert self.interrupted_by is not None
        again = shlex.join(["millrace", *sys.argv[1:]])
        if problem:
            self._terminal.say(f"{problem} `millrace stop RUN` ends them.")
        log = self._terminal.log()
        logged = f", what libraries logged meanwhile is in {log}," if log else ","
        self._terminal.say(
            f"Ended by {NAMES[self.interrupted_by]}; what finished is kept{logged} and the same command goes on: {again}"
        )
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        os._exit(128 + self.interrupted_by)


def _react(loop: asyncio.AbstractEventLoop) -> None:
    """Call all functions that a loop's flows registered, before any of the flows continues."""
    for registered_in, react in list(_reactions):
        if registered_in is loop:
            react()
