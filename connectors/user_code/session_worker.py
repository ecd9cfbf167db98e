"""The process that runs rollouts side by side: the user's functions, environments and tools.

Owns one event loop for all sessions. Records in shared memory, which outlives the process, which session's code is running.
Talks to the driver by the messages of core/sessions/pipe.py. An exception in a session ends it, with the reason.
"""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import contextvars
import inspect
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from millrace.connectors.user_code.mcp_tools import WorkerTools
from millrace.connectors.user_code.process import detach, limit_memory
from millrace.core.config.parts.redaction import shown_text
from millrace.core.config.rollout import SessionSection as Settings
from millrace.core.contracts.references import resolved, scrubbed
from millrace.core.errors import described
from millrace.core.hooks.loading import load, load_function, written_for_slime
from millrace.core.hooks.rollout_selection import rollout_function
from millrace.core.rewards.scoring import read_score
from millrace.core.sessions import pipe
from millrace.core.sessions.forms import act_in, use_tools
from millrace.core.sessions.interface import LimitReachedError
from millrace.core.sessions.live import LiveSession, ServedRollout, Shared
from millrace.core.sessions.tools import unended
from millrace.core.sessions.tree import BranchReward

# most rollouts need no server, so aiohttp is imported only when one does
if TYPE_CHECKING:
    from millrace.connectors.user_code.session_server import SessionServer

LINE = 1 << 28  # bytes of the longest message
_session = contextvars.ContextVar("session", default=0)


class Stepped(collections.abc.Coroutine[Any, Any, Any]):
    """A coroutine that records, while it runs, which session it belongs to."""

    def __init__(self, inner: Coroutine[Any, Any, Any], session: int, note: Any) -> None:
        self._inner, self._session, self._note = inner, session, note

    def send(self, value: Any) -> Any:
        """Run to the next await."""
        return self._noted(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        """Run to the next await, from an error."""
        return self._noted(self._inner.throw, *error)

    def close(self) -> None:
        """End it."""
        self._noted(self._inner.close)

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Stepped:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def _noted(self, step: Callable[..., Any], *args: Any) -> Any:
        self._note.value = self._session
        try:
            return step(*args)
        finally:
            self._note.value = 0


def serve(connection: socket.socket, note: Any, settings: Mapping[str, Any]) -> None:
    """Run sessions until the driver closes the connection. note: a shared number, the session whose code is running, or 0."""
    detach()
    worker = _Worker(Settings.model_validate(settings), note)
    limit_memory(worker.settings.memory_mb)
    asyncio.run(worker.serve(connection))


class _Worker:
    """All sessions of this process."""

    def __init__(self, settings: Settings, note: Any) -> None:
        self.settings = settings
        self._given = settings.model_dump(mode="json")  # with references to secrets, not their values
        self._note = note
        self._tools = WorkerTools(settings.tools)
        self._waiting: dict[tuple[int, int], asyncio.Future[pipe.Reply]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._asked = 0
        self._server: SessionServer | None = None

    async def serve(self, connection: socket.socket) -> None:
        """Handle messages until the driver closes the connection."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._task)
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=LINE)
        await self._tools.connect()
        self._send(pipe.Ready())
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._take(pipe.TO_PROCESS.read(line))
        for task in self._tasks.values():
            task.cancel()

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        context: contextvars.Context | None = options.get("context")
        session = context.get(_session, 0) if context else _session.get()
        if session and inspect.iscoroutine(coro):
            coro = Stepped(coro, session, self._note)
        return asyncio.Task(coro, loop=loop, **options)

    def _take(self, message: pipe.Envelope[pipe.ToProcess]) -> None:
        number = message.session
        match message.body:
            case pipe.Start() as start:
                context = contextvars.copy_context()
                context.run(_session.set, number)
                self._tasks[number] = asyncio.get_running_loop().create_task(
                    self._run(number, start), context=context
                )
            case pipe.Ping():
                self._send(pipe.Pong())
            case pipe.Cancel():
                if task := self._tasks.get(number):
                    task.cancel()
            case reply:
                waiting = self._waiting.pop((number, message.request), None)
                if waiting and not waiting.done():
                    waiting.set_result(reply)

    async def _run(self, number: int, start: pipe.Start) -> None:
        served = ServedRollout(start.sampling)
        shared = Shared(
            task=start.task,
            messages=start.messages,
            seed=start.seed,
            ask=lambda request: self._ask(number, request),
            make_call=self._tools.call,
            serve=lambda session: self._serve(session, served),
            timeout_s=self.settings.timeout_s,
            sampling=start.sampling,
            over=lambda: self._send(pipe.CallStuck()) if unended else None,
        )
        session = LiveSession(shared)
        end = pipe.End("completed")
        try:
            returned = await self._made(session, start, served)
            if returned is not None:
                result = read_score(returned, "the rollout")
                answer = {} if result.answer is None else {"answer": result.answer}
                session.reward(result.reward, **{**result.parts, **answer})
        except LimitReachedError as error:
            end = pipe.End("truncated", str(error))
        except asyncio.CancelledError:
            end = pipe.End("failed", "CancelledError")
        except BaseException as error:  # noqa: BLE001 - user code raises anything, and that ends its rollout
            end = pipe.End("failed", self._said(error))
            # a limit reaches user code as its client's error, which is no failure of the rollout
            if served.limit and isinstance(error, Exception):
                end = pipe.End("truncated", served.limit)
        del self._tasks[number]
        if self._server:
            self._server.close(served)
        try:
            rewards = {branch: _reward(given) for branch, given in shared.all_rewards().items()}
        except (TypeError, ValueError) as error:
            rewards, end = {}, pipe.End("failed", self._said(error))
        end = replace(end, rewards=rewards, left_out=shared.left_out, cut=sorted(shared.cut))
        self._send(end, number)

    def _said(self, error: BaseException) -> str:
        """A rollout's error as text, without the secrets of its functions and tools, since it is stored."""
        return shown_text(scrubbed(described(error), self._given))

    def _serve(self, session: LiveSession, served: ServedRollout) -> tuple[str, str]:
        if self._server is None:
            from millrace.connectors.user_code.session_server import SessionServer

            self._server = SessionServer(self._tools.schemas)
        return self._server.serve(session, served)

    async def _made(self, session: LiveSession, start: pipe.Start, served: ServedRollout) -> Any:
        settings = self.settings
        field, chosen = rollout_function(settings, session.task.metadata)
        if chosen and written_for_slime(chosen.function):
            from millrace.core.hooks.slime.generate import SlimeRollout

            assert start.slime is not None, "the driver knows that it is written for slime"
            rollout = SlimeRollout(session, start.slime, start.sampling)
            served.native = rollout.complete
            function = load(chosen.function, f"{field}.function")
            options = resolved(chosen.options, f"{field}.options")
            return await rollout.make(function, options)
        if chosen:
            return await load_function(chosen, field)(session)
        if settings.environment:
            make = load_function(settings.environment, "rollout.session.environment")
            return await act_in(session, make)
        return await use_tools(session)

    async def _ask(self, number: int, request: pipe.Request) -> pipe.Reply:
        self._asked += 1
        asked = self._asked
        # the driver ends a process that sends a field of a wrong type; here it is an error of this session alone
        pipe.FROM_PROCESS.read(pipe.Envelope(request, number, asked).line())
        future: asyncio.Future[pipe.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number, asked] = future
        self._send(request, number, asked)
        return await future

    def _send(self, body: pipe.FromProcess, session: int = 0, request: int = 0) -> None:
        assert self._writer is not None, "serve comes first"
        self._writer.write(pipe.Envelope(body, session, request).line())


def _reward(given: Mapping[str, Any]) -> BranchReward:
    result = read_score(given, "session.reward")
    return BranchReward(result.reward, dict(result.parts), result.answer)
