"""The driver's side of the processes that run rollouts: which process runs which session, and which session ended a process.

Owns deadlines and blame. A process that hangs or dies takes all of its sessions with it. The session whose code was running
is blamed; the others are not, and may be run again. Knows nothing of tokens, records or files.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import itertools
import logging
import multiprocessing
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from millrace.connectors.user_code.process import kill_with_descendants, processes_of
from millrace.connectors.user_code.session_worker import LINE, serve
from millrace.core.config.rollout import SessionSection as Settings
from millrace.core.errors import MillraceError
from millrace.core.sessions import pipe

START_TIMEOUT_S = 120.0
LOOK_S = 0.25  # seconds between checks of deadlines
FROM_ANYWHERE = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes that another process may have caused
GRACE_S = 5.0  # from cancelling a session to killing its process
log = logging.getLogger(__name__)

Handle = Callable[[pipe.Request], Awaitable[pipe.Reply]]
"""Answers a request of a session."""


class SessionLostError(Exception):
    """A session's process ended. `blamed`: this session's code caused it; if False, the session may be run again.

    `certain`: the blame is certain. It is not after SIGKILL or SIGTERM, which another process or the kernel may have sent.
    """

    def __init__(self, reason: str, blamed: bool, certain: bool = True) -> None:
        super().__init__(reason)
        self.blamed, self.certain = blamed, certain


class _Running:
    """A session in a process."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.end: asyncio.Future[pipe.End] = asyncio.get_running_loop().create_future()
        self.open = 0  # requests that are being answered
        self.calling = False  # a tool call is in progress
        self.heard = time.monotonic()  # when its code last started to work
        self.cancelled: tuple[float, str] | None = None  # when it was asked to end, and why
        self.answering: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Cancel the answers in progress."""
        answering = list(self.answering)
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)


class SessionPool:
    """Runs sessions, many side by side in each of `settings.workers` processes. Processes start when first needed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: list[_SessionProcess] = []
        self._starting = asyncio.Lock()
        atexit.register(self.close)

    async def run(self, start: pipe.Start, handle: Handle, *, alone: bool = False) -> pipe.End:
        """Run one session to its end. `alone`: in a separate process.

        Errors: SessionLostError; MillraceError if no process can be started. An error of `handle` ends the session and is raised.
        """
        process = await self._process(alone)
        try:
            return await process.run(start, handle)
        finally:
            if alone:
                process.kill("it is done")

    async def _process(self, alone: bool) -> _SessionProcess:
        async with self._starting:
            self._processes = [process for process in self._processes if not process.ended]
            if alone:
                return await self._start()
            if len(self._processes) < self._settings.workers:
                self._processes.append(await self._start())
            return min(self._processes, key=lambda process: len(process.sessions))

    async def _start(self) -> _SessionProcess:
        process = _SessionProcess(self._settings)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.start()
        except (TimeoutError, OSError) as error:
            process.kill("it did not start")
            raise MillraceError(
                f"no process for rollouts could be started: {error or 'it does not answer'}",
                where="rollout.session.workers",
                remedy="look at what the modules that rollout.session names do when they are imported, and at this host's memory",
            ) from error
        return process

    def close(self) -> None:
        """Kill all processes."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill("the run ends")
        self._processes.clear()


class _SessionProcess:
    """One process and its sessions."""

    def __init__(self, settings: Settings) -> None:
        self.sessions: dict[int, _Running] = {}
        self.ended = False
        self._settings = settings
        self._numbers = itertools.count(1)
        self._why = ""  # the reason for killing it, once that is under way
        self._blamed: set[int] = set()
        self._pinged: float | None = None
        self._ready = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Start it, and wait until it accepts sessions. Raises OSError if it exits instead."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        self._note = context.RawValue(ctypes.c_longlong, 0)
        settings = self._settings.model_dump(mode="json")
        self._process = context.Process(
            target=serve, args=(theirs, self._note, settings), name="millrace-rollouts", daemon=True
        )
        await asyncio.to_thread(self._process.start)
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE)
        self._spawn(self._read(reader))
        self._spawn(self._watch())
        await self._ready

    async def run(self, start: pipe.Start, handle: Handle) -> pipe.End:
        """Run a session in this process."""
        number = next(self._numbers)
        session = self.sessions[number] = _Running(handle)
        try:
            self._send(start, number)
            async with asyncio.timeout(None) as deadline:
                deadline.reschedule(asyncio.get_running_loop().time() + self._settings.rollout_timeout_s)
                try:
                    end = await asyncio.shield(session.end)
                except asyncio.CancelledError:
                    if not deadline.expired() and not session.end.done():
                        self._cancel(number, "the run ends")
                    raise
        except TimeoutError:
            self._cancel(
                number,
                f"it took longer than rollout.session.rollout_timeout_s = {self._settings.rollout_timeout_s:g}",
            )
            end = await session.end
        finally:
            self.sessions.pop(number, None)
            await session.stop()
        if session.cancelled:
            return pipe.End("failed", session.cancelled[1])
        return end

    def kill(self, why: str) -> None:
        """Kill it, with all processes that its sessions started."""
        if not self._why:
            self._why = why
        process = getattr(self, "_process", None)
        if process is not None and process.pid:
            kill_with_descendants(process.pid)
            process.kill()
        self.ended = True

    def _send(self, body: pipe.ToProcess, session: int = 0, request: int = 0) -> None:
        if not self._writer.is_closing():
            self._writer.write(pipe.Envelope(body, session, request).line())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                while line := await reader.readline():
                    self._take(pipe.FROM_PROCESS.read(line))
            except ValueError as error:
                self._blame_running(f"it sent the driver a line that is no message: {error}")
        await asyncio.to_thread(self._process.join, GRACE_S)
        await self._bury()

    def _take(self, message: pipe.Envelope[pipe.FromProcess]) -> None:
        session = self.sessions.get(message.session)
        match message.body:
            case pipe.Ready():
                if not self._ready.done():
                    self._ready.set_result(None)
            case pipe.Pong():
                late = 0.0 if self._pinged is None else time.monotonic() - self._pinged
                self._pinged = None
                # while the ping waited, one session's code held the process: the others lose no time for it
                for waited in self.sessions.values():
                    waited.heard += late
            case pipe.CallStuck():
                self.kill("a call in it did not end")
            case pipe.End() as end:
                if session and not session.end.done():
                    session.end.set_result(end)
            case request:
                if session:
                    session.open += 1
                    session.calling = False
                    work = self._answer(message.session, message.request, request, session)
                    task = asyncio.get_running_loop().create_task(work)
                    session.answering.add(task)
                    task.add_done_callback(session.answering.discard)

    async def _answer(self, number: int, asked: int, request: pipe.Request, session: _Running) -> None:
        try:
            reply = await session.handle(request)
        except Exception as error:  # noqa: BLE001 - the driver's error; `run` raises it
            if not session.end.done():
                session.end.set_exception(error)
            self._cancel(number, "the driver failed")
            return
        session.open -= 1
        session.heard = time.monotonic()
        session.calling = isinstance(reply, pipe.MakeCall)
        self._send(reply, number, asked)

    def _cancel(self, number: int, why: str) -> None:
        session = self.sessions.get(number)
        if session and not session.cancelled:
            session.cancelled = time.monotonic(), why
            self._send(pipe.Cancel(), number)

    async def _watch(self) -> None:
        """Enforce the deadlines of sessions, and kill the process if it does not answer."""
        limit = self._settings.timeout_s
        while not self.ended:
            await asyncio.sleep(LOOK_S)
            if not self._ready.done():
                continue  # its start has another deadline
            if len(processes_of(self._process.pid or 0)) > self._settings.max_processes + 1:
                self._blame_running(
                    f"it started more than rollout.session.max_processes = {self._settings.max_processes} processes"
                )
                return
            now = time.monotonic()
            if self._pinged is None:
                self._pinged = now
                self._send(pipe.Ping())
            elif now - self._pinged > limit + LOOK_S:
                self._blame_running(f"no answer within rollout.session.timeout_s = {limit:g} s")
                return
            elif now - self._pinged > 2 * LOOK_S:
                continue  # one session holds the process, so the others' silence says nothing
            for number, session in list(self.sessions.items()):
                if session.end.done():
                    continue
                if session.cancelled and now - session.cancelled[0] > GRACE_S:
                    self._blamed.add(number)
                    self.kill(session.cancelled[1])
                    return
                # the process ends a tool call that passes the limit, and needs a moment for it
                patience = limit + (GRACE_S if session.calling else 0)
                if not session.open and not session.cancelled and now - session.heard > patience:
                    self._cancel(number, f"no answer within rollout.session.timeout_s = {limit:g} s")

    def _blame_running(self, why: str) -> None:
        """Kill it, and blame the session whose code is running."""
        self._blamed = self._suspected()
        self.kill(why)

    async def _bury(self) -> None:
        """Tell each session that its process is gone, and whether it is blamed."""
        code = self._process.exitcode
        died = f"its process died of signal {-code} ({signal.strsignal(-code)})" if code and code < 0 else ""
        why = self._why or died or f"its process ended itself with exit code {code}"
        certain = bool(self._why) or code not in FROM_ANYWHERE
        if not self._why:
            self._blamed = self._suspected()
        self.kill(why)
        if not self._ready.done():
            self._ready.set_exception(OSError(why))
        for number, session in list(self.sessions.items()):
            await session.stop()
            if not session.end.done():
                session.end.set_exception(SessionLostError(why, number in self._blamed, certain))
        self._writer.close()

    def _suspected(self) -> set[int]:
        """The session whose code is running; otherwise the only session with a tool call in a thread, if there is just one."""
        running = int(self._note.value)
        if running in self.sessions:
            return {running}
        at_work = {n for n, session in self.sessions.items() if session.calling and not session.open}
        return at_work if len(at_work) == 1 else set()
