"""The driver's end of the board for one topic.

Owns what passes between the driver's Stream and the board, the engines that shards ask for, and failures counted over all shards.
Knows nothing of how shards are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable

from millrace.connectors.ray.actors import Actor
from millrace.connectors.sglang.dispatcher import Dispatcher
from millrace.core.contracts.task_records import FileRecord
from millrace.core.errors import ActorLostError, EngineError, EngineLostError, EngineStalledError
from millrace.tasks.context import IterationContext
from millrace.tasks.samples.failures import FailureBudget
from millrace.tasks.shards.board import (
    Board,
    DeferralKnown,
    Ended,
    EngineLost,
    EnginesReady,
    EnginesWanted,
    Failed,
    Known,
    Landed,
    Notice,
    Released,
    SendsNothing,
    Settled,
    ShardReplacedError,
    Topic,
    Writer,
)
from millrace.tasks.shards.mirror import LOOK_S
from millrace.tasks.shards.senders import Senders
from millrace.tasks.stream import STREAMED, Kind, Stream

LAST_WORDS_S = 5.0  # for telling a shard that nobody waits for it


class Conversation:
    """What the driver tells the shards on a topic and hears from them."""

    def __init__(
        self,
        ctx: IterationContext,
        board: Actor[Board],
        token: int,
        topic: Topic,
        stream: Stream,
        engines: Callable[[], Awaitable[Dispatcher]],
    ) -> None:
        """stream: what shards are to follow. engines: makes those ready that the shards ask."""
        self.engines_s = 0.0  # until engines were ready for the first time
        self.senders = Senders(self._tell)
        self._parts, self._board, self._token, self._topic = ctx.parts, board, token, topic
        self._stream, self._engines = stream, engines
        self._heard = 0
        self._moved = asyncio.Condition()
        self._known: set[tuple[Kind, str]] = set()  # parts that shards know of
        self._files: set[tuple[Kind, str]] = set()  # parts in the lists of the context
        self._counting: set[Kind] = set()  # whose stored parts are counted
        self._budgets: dict[str, FailureBudget] = {}
        self._wanted: list[EnginesWanted] = []
        self._lost: list[EngineLost] = []
        self._asked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Begin to pass on what the driver releases, and to read the notices of the shards."""
        await self._board.call(Board.open, self._topic)
        parts = self._hear, self._relay, self._serve_engines
        self._tasks = [asyncio.create_task(self._guarded(part)) for part in parts]

    async def close(self) -> None:
        """End it. Shards that still work are given up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure.done():
            self._failure.exception()  # seen
        with contextlib.suppress(ActorLostError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._board.call(Board.close, self._topic)

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._failure.done()

    async def until_failed(self) -> None:
        """Wait for what ends the work: a budget that is spent, engines that cannot be made ready, a lost board."""
        await asyncio.shield(self._failure)

    def count_failures(self, name: str, budget: FailureBudget) -> None:
        """Count failures that shards tell by this name in a budget."""
        self._budgets[name] = budget

    async def know(self, kind: Kind, files: Iterable[FileRecord]) -> None:
        """Count these parts, which storage has, as the context does, and let all shards know of them."""
        listed = [file["path"] for file in files]
        self._files |= {(kind, path) for path in listed}
        self._counting.add(kind)
        await self.show(kind, listed)

    async def show(self, kind: Kind, paths: Iterable[str]) -> None:
        """Let all shards know of these parts."""
        new = [path for path in paths if (kind, path) not in self._known]
        self._known |= {(kind, path) for path in new}
        if new:
            await self._tell(Known(kind, tuple(new)))

    def counts(self, kind: Kind, path: str) -> bool:
        """Whether a part is one of those that count."""
        return (kind, path) in self._files

    def counted(self, kind: Kind, listed: Iterable[str]) -> list[str]:
        """Of the parts that a listing shows, those that count: all until those that were stored before are counted."""
        return [path for path in listed if kind not in self._counting or self.counts(kind, path)]

    async def take_in(self, kind: Kind, file: FileRecord) -> None:
        """Count a part."""
        if self.counts(kind, file["path"]):
            return
        self._files.add((kind, file["path"]))
        self._parts[kind].append(file)
        if kind in STREAMED:
            await self._stream.land(kind, file["path"])

    def make_engines_ready(self) -> None:
        """Begin to make engines ready before a shard asks for them."""
        self._asked.set()

    async def begin(self, writer: Writer) -> None:
        """Begin an attempt of a shard."""
        await self._board.call(Board.begin, self._topic, writer)

    async def end(self, writer: Writer) -> None:
        """Give an attempt up."""
        with contextlib.suppress(ActorLostError, ShardReplacedError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._tell(Ended(writer))

    async def catch_up(self) -> None:
        """Return once every notice that the board has now was read."""
        number = await self._board.call(Board.count_notices, self._token, self._topic)
        async with self._moved:
            await self._moved.wait_for(lambda: self._heard >= number or self.failed)

    async def _tell(self, *notices: Notice) -> None:
        await self._board.call(Board.tell, self._token, self._topic, notices)

    async def _guarded(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except ShardReplacedError as error:
            await self._fail(ActorLostError(f"the board of the run was made again: {error}"))
        except Exception as error:  # noqa: BLE001 - whoever waits for the shards raises it
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
        await self.senders.give_up()
        async with self._moved:
            self._moved.notify_all()

    async def _hear(self) -> None:
        while True:
            notices = await self._board.call(Board.since, self._token, self._topic, self._heard, LOOK_S)
            for notice in notices:
                await self._take(notice)
            async with self._moved:
                self._heard += len(notices)
                self._moved.notify_all()

    async def _take(self, notice: Notice) -> None:
        if isinstance(notice, Landed):
            await self.take_in(notice.kind, notice.file)
        elif isinstance(notice, Failed) and notice.budget in self._budgets:
            budget = self._budgets[notice.budget]
            budget.add(notice.reason, notice.sample)
            budget.check()
        elif isinstance(notice, EngineLost):
            self._lost.append(notice)
        elif isinstance(notice, EnginesWanted):
            self._wanted.append(notice)
            self._asked.set()
        elif isinstance(notice, SendsNothing):
            await self.senders.silent(notice)

    async def _relay(self) -> None:
        """Tell what the driver's Stream releases, that it knows what was deferred, and that it has settled."""
        stream = self._stream
        released, joined, settled = 0, False, False
        while True:
            revision = stream.revision
            if stream.joined is not None and not joined:
                joined = True
                await self._tell(DeferralKnown(len(stream.joined.groups)))
            if stream.released != released:
                released = stream.released
                await self._tell(Released(released))
            if stream.settled and not settled:
                settled = True
                await self._tell(Settled())
            await stream.wait(revision)

    async def _serve_engines(self) -> None:
        """Make engines ready for those who want them; one turn serves all that asked before it."""
        dispatcher = None
        while True:
            await self._asked.wait()
            async with self.senders.ready:
                dispatcher = await self._make_ready(dispatcher)

    async def _make_ready(self, dispatcher: Dispatcher | None) -> Dispatcher | None:
        """Make engines ready for those who have asked. dispatcher: that of the last time; returns the new one."""
        self._asked.clear()
        wanted, self._wanted = tuple(self._wanted), []
        lost, self._lost = self._lost, []
        started = time.perf_counter()
        for each in lost:
            if dispatcher:
                kind = EngineStalledError if each.stalled else EngineLostError
                dispatcher.mark_lost(each.engine_id, each.url, kind(each.reason))
        try:
            dispatcher = await self._engines()
        except EngineError as error:
            await self._tell(EnginesReady(wanted, (), str(error)))
            return dispatcher
        self.engines_s = self.engines_s or time.perf_counter() - started
        self.senders.add(each.writer for each in wanted)
        await self._tell(EnginesReady(wanted, tuple(dispatcher.addresses())))
        return dispatcher
