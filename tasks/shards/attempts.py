"""The shards of one topic, as the driver sees them: Ray tasks that it starts, and starts again if they die.

Owns the attempts of shards, what they are told and tell, the engines that they ask for, and that a part counts once: what a shard
wrote before it died counts, what a replaced attempt writes later is removed. Knows nothing of how a shard works.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from prefect import Task

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.ray.task_runs import run_on_ray
from millrace.connectors.storage.parts import list_parts, replace_attempt
from millrace.core.accounts.staleness import VersionRange
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.task_records import FileRecord
from millrace.core.contracts.topics import Topic
from millrace.core.errors import (
    ActorLostError,
    EngineError,
    EngineLostError,
    EngineStalledError,
    together,
)
from millrace.core.sharding import PlacedShare, shares
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.run_recorded import after_tries
from millrace.tasks.shards.board import (
    CALL_S,
    IMPORTS,
    Attempt,
    Board,
    BoardState,
    EngineReply,
    EngineRequest,
    EnginesState,
    Idle,
    Link,
    Part,
    ShardCall,
    ShardReplacedError,
    Work,
)
from millrace.tasks.stream import STREAMED, Kind, Stream

log = logging.getLogger(__name__)
STARTS = 3  # of a shard, in one try of its task
LAST_WORDS_S = 5.0  # for telling a shard that nobody waits for it
Record = TypeVar("Record")
RunShard = Callable[[Task[[Any], Any], ShardCall, str | None], Awaitable[Any]]
"""Runs a shard to its end on a node, or raises ActorLostError if it dies."""


def on_ray() -> RunShard:
    """Runs shards as tasks of the flow run that this is called in. Called outside of its tasks: see run_on_ray."""
    flow = copy_context()

    async def run(task: Task[[Any], Any], call: ShardCall, node: str | None) -> Any:
        return await run_on_ray(task, call, flow, node, IMPORTS)

    return run


class Attempts:
    """The attempts of the shards that work on one topic."""

    def __init__(
        self,
        ctx: IterationContext,
        topic: Topic,
        stream: Stream,
        versions: Callable[[], VersionRange],
        run: RunShard,
    ) -> None:
        """stream: what shards are to follow. versions: of the weights that generate."""
        self._ctx, self._topic, self._stream = ctx, topic, stream
        self._versions, self._run_shard = versions, run
        self._opening = asyncio.Lock()
        self._unfinished: list[Attempt] = []  # that have not ended well, and may still write
        self._side: DriverSide | None = None

    async def close(self) -> None:
        """Give up what still works."""
        if self._side:
            pauses = self._ctx.runtime.board.pauses
            if self._side.without_requests in pauses:
                pauses.remove(self._side.without_requests)
            await self._side.close()

    def counted(self, kind: Kind, listed: Sequence[str]) -> list[str]:
        """The parts of a listing that count."""
        return self._side.counted(kind, listed) if self._side else list(listed)

    async def side(self) -> DriverSide:
        """The driver's side of the topic's state; a new one after the board was lost."""
        async with self._opening:
            if self._side and self._side.over:
                await self.close()
                self._side = None
            if self._side is None:
                keeper = self._ctx.runtime.board
                link = Link(await keeper.board(), keeper.token, self._topic)
                side = DriverSide(self._ctx, link, self._stream, self._engines)
                await side.open()
                self._side = side
                keeper.pauses.append(side.without_requests)
            return self._side

    async def note_earlier(self, work: Work, kinds: Sequence[Kind]) -> None:
        """Before a task is tried again: note which parts count of the attempts that the previous try left. What they still write does
        not. kinds: of the parts that they write."""
        earlier = [attempt for attempt in self._unfinished if attempt.work == work]
        for kind in kinds if earlier else ():
            await asyncio.to_thread(self._ctx.start_parts, kind)
        for attempt in earlier:
            await self._note_replaced(attempt, kinds)

    async def run(
        self,
        side: DriverSide,
        task: Task[[Any], Coroutine[Any, Any, Record]],
        work: Work,
        kinds: Sequence[Kind],
    ) -> list[Record]:
        """Run all shards of one kind of work to their end; their records. kinds: of the parts that they write."""
        placed = shares(await self._ctx.runtime.board.nodes(), self._ctx.config.rollout.shards)
        async with together() as group:
            running = [
                group.create_task(self._shard(side, task, work, kinds, number, each))
                for number, each in enumerate(placed)
            ]
            watching = group.create_task(side.until_failed())
            records = list(await asyncio.gather(*running))
            watching.cancel()
        await side.catch_up()
        for kind in kinds:
            await self.remove_strays(side, kind)
        return records

    async def _engines(self) -> Dispatcher:
        return await self._ctx.engines_at(self._versions())

    async def _shard(
        self,
        side: DriverSide,
        task: Task[[Any], Coroutine[Any, Any, Record]],
        work: Work,
        kinds: Sequence[Kind],
        number: int,
        placed: PlacedShare,
    ) -> Record:
        """Run one shard to its end, again if its process or node dies."""
        ctx, keeper = self._ctx, self._ctx.runtime.board
        for start in count(1):
            attempt = Attempt(work, number, next(keeper.attempts))
            await side.start(attempt)
            self._unfinished.append(attempt)
            limit = ctx.config.part_limit
            call = ShardCall(keeper.token, self._topic, attempt, placed.share, self._versions(), limit)
            try:
                record: Record = await self._run_shard(task, call, placed.node)
                self._unfinished.remove(attempt)
                return record
            except ActorLostError as error:
                if start == STARTS or side.over:
                    raise ActorLostError(
                        f"shard {number} of {work}: {error}", remedy=after_tries(start)
                    ) from None
                log.warning(
                    "iteration %d, shard %d of %s: %s; starting it again",
                    iteration_number(ctx.index),
                    number,
                    work,
                    error,
                )
                await self.take_in_written(side, kinds)
                await self._note_replaced(attempt, kinds)
            except BaseException:
                await side.give_up(attempt)
                raise
            finally:
                await side.ended(attempt)
        raise AssertionError("the last start returns or raises")

    async def take_in_written(self, side: DriverSide, kinds: Sequence[Kind]) -> None:
        """Count the parts that a dead shard had written without reporting them."""
        await side.catch_up()
        for kind in kinds:
            for path in await self._uncounted(side, kind):
                entry = await asyncio.to_thread(self._ctx.folder.entry, path)
                await side.take_in(kind, entry.record())
                await side.show(kind, [path])

    async def _note_replaced(self, attempt: Attempt, kinds: Sequence[Kind]) -> None:
        """Note for later drivers which parts of an attempt count. Others that a listing shows later are of samples that the next
        attempt makes."""
        ctx = self._ctx
        parts: dict[str, list[str]] = {kind: [file["path"] for file in ctx.parts[kind]] for kind in kinds}
        token, run = ctx.runtime.board.token, ctx.run_folder.owner.run_id
        await asyncio.to_thread(replace_attempt, ctx.folder, token, attempt.number, parts, run)
        self._unfinished.remove(attempt)

    async def remove_strays(self, side: DriverSide, kind: Kind) -> None:
        """Remove parts that a replaced attempt never reported: another attempt has generated their samples."""
        for path in await self._uncounted(side, kind):
            log.warning(
                "removing %s: the shard that wrote it had been replaced", self._ctx.folder.url_of(path)
            )
            await asyncio.to_thread(self._ctx.folder.remove, path)

    async def _uncounted(self, side: DriverSide, kind: Kind) -> Sequence[str]:
        listed = await asyncio.to_thread(list_parts, self._ctx.folder, kind)
        return [path for path in listed if not side.counts(path)]


class DriverSide:
    """What the driver tells the shards of a topic, and what it takes over of what they tell."""

    def __init__(
        self,
        ctx: IterationContext,
        link: Link,
        stream: Stream,
        make_engines_ready: Callable[[], Awaitable[Dispatcher]],
    ) -> None:
        """stream: what shards are to follow."""
        self.engines_s = 0.0  # until engines were ready for the first time
        self._parts, self._link, self._stream = ctx.parts, link, stream
        self._make_engines_ready = make_engines_ready
        self._taken = 0  # revision up to which the state was taken over
        self._moved = asyncio.Condition()
        self._paths: set[str] = set()  # of parts in the lists of the context
        self._counting: set[Kind] = set()  # whose stored parts are in `_paths`
        self._budgets: dict[str, FailureBudget] = {}
        self._running: set[Attempt] = set()
        self._sending: set[Attempt] = set()  # that have engines
        self._idle: set[Idle] = set()
        self._requests: list[EngineRequest] = []  # without a reply
        self._wanted = asyncio.Event()
        self._engines = EnginesState()
        self._dispatcher: Dispatcher | None = None  # that last made them ready
        self._settling = asyncio.Lock()  # held while engines are made ready, or given other weights
        self._working: asyncio.Task[None] | None = None
        self.over = False  # closed, or ended with an error

    async def open(self) -> None:
        """Start to tell shards what the driver releases, and to take over what they tell."""
        await self._link.call(Board.open)
        self._working = asyncio.create_task(self._work())

    async def close(self) -> None:
        """End it. Shards that still work are given up."""
        if self._working:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        with contextlib.suppress(ActorLostError, ShardReplacedError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._link.call(Board.close)

    async def until_failed(self) -> None:
        """Wait for what ends the work: a budget that is spent, engines that cannot be made ready, a lost board."""
        assert self._working is not None, "open comes first"
        await asyncio.shield(self._working)

    async def start(self, attempt: Attempt) -> None:
        """Have an attempt of a shard count, and no earlier one."""
        await self._link.call(Board.start, attempt)
        self._running.add(attempt)

    async def give_up(self, attempt: Attempt) -> None:
        """Let an attempt end: nobody waits for it any more."""
        with contextlib.suppress(ActorLostError, ShardReplacedError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._link.call(Board.give_up, attempt)

    async def ended(self, attempt: Attempt) -> None:
        """Note that an attempt has ended, or died."""
        async with self._moved:
            self._running.discard(attempt)
            self._sending.discard(attempt)
            self._moved.notify_all()

    async def catch_up(self) -> None:
        """Return once all that shards have told by now was taken over."""
        newest = await self._link.call(Board.revision)
        await self._until(lambda: self._taken >= newest)

    # parts and failures

    async def count_stored(self, kind: Kind) -> None:
        """Count the parts that the context lists, and let all shards know of them."""
        listed = [file["path"] for file in self._parts[kind]]
        self._stream.add_listed(kind, listed)
        self._paths.update(listed)
        self._counting.add(kind)
        await self.show(kind, listed)

    async def show(self, kind: Kind, paths: Sequence[str]) -> None:
        """Let all shards know of these parts."""
        if paths:
            await self._link.call(Board.tell, BoardState(parts=tuple(Part(kind, path) for path in paths)))

    def counts(self, path: str) -> bool:
        """Whether a part counts."""
        return path in self._paths

    def counted(self, kind: Kind, listed: Sequence[str]) -> list[str]:
        """The parts of a listing that count: all, until the parts that were stored before are counted."""
        return [path for path in listed if kind not in self._counting or self.counts(path)]

    async def take_in(self, kind: Kind, file: FileRecord) -> None:
        """Count a part."""
        if self.counts(file["path"]):
            return
        self._paths.add(file["path"])
        self._parts[kind].append(file)
        if kind in STREAMED:
            await self._stream.land(kind, file["path"])

    def count_failures(self, name: str, budget: FailureBudget) -> None:
        """Count failures that shards tell by this name in a budget."""
        self._budgets[name] = budget

    # engines

    def make_engines_ready(self) -> None:
        """Start to make engines ready before a shard asks for them."""
        self._wanted.set()

    @contextlib.asynccontextmanager
    async def without_requests(self, amid: bool) -> AsyncIterator[None]:
        """Within, no shard sends a request or gets engines. amid: engines keep the requests that they have.

            driver   updating         waits for all attempts that have engines   changes the weights   engines, when asked
            shard    sends requests   idle                                       asks for engines      sends requests

        SGLang 0.5.17 dies when weights come while requests wait.
        """
        async with self._settling:
            with contextlib.suppress(ActorLostError, ShardReplacedError):  # its shards end with the board
                if self._sending:
                    known, update = self._engines, self._engines.updates + 1
                    amid_now = known.updates_amid + amid
                    await self._say(replace(known, updates=update, updates_amid=amid_now, updating=True))
                    await self._until(lambda: self._idle >= {Idle(each, update) for each in self._sending})
            yield

    async def _serve_engines(self) -> None:
        """Make engines ready when shards ask; one turn serves all requests so far."""
        while True:
            await self._wanted.wait()
            async with self._settling:
                await self._serve_requests()

    async def _serve_requests(self) -> None:
        self._wanted.clear()
        requests, self._requests = self._requests, []
        started = time.perf_counter()
        for each in (lost for request in requests for lost in request.lost):
            if self._dispatcher:
                kind = EngineStalledError if each.stalled else EngineLostError
                self._dispatcher.mark_lost(each.engine_id, each.url, kind(each.reason))
        engines, reason = self._engines, None
        try:
            self._dispatcher = await self._make_engines_ready()
        except EngineError as error:
            reason = str(error)
        else:
            self.engines_s = self.engines_s or time.perf_counter() - started
            # an attempt that died since it asked never says that it is idle
            self._sending |= {request.attempt for request in requests} & self._running
            engines = replace(engines, serving=tuple(self._dispatcher.addresses()), updating=False)
        replies = (EngineReply(request.attempt, request.number, reason) for request in requests)
        await self._say(replace(engines, replies=(*engines.replies, *replies)))

    async def _say(self, engines: EnginesState) -> None:
        self._engines = replace(engines, number=self._engines.number + 1)
        await self._link.call(Board.tell, BoardState(engines=self._engines))

    # what runs beside the shards

    async def _work(self) -> None:
        try:
            async with together() as group:
                for work in (self._follow, self._relay, self._serve_engines):
                    group.create_task(work())
        except ShardReplacedError as error:
            raise ActorLostError(f"the board of the run was made again: {error}") from None
        finally:
            async with self._moved:
                self.over = True
                self._moved.notify_all()

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds, or the shards end."""
        async with self._moved:
            await self._moved.wait_for(lambda: holds() or self.over)

    async def _follow(self) -> None:
        """Take over what shards tell."""
        while True:
            new = await self._link.call(Board.wait, self._taken, CALL_S)
            for part in new.parts:
                if part.file:
                    await self.take_in(part.kind, part.file)
            for failure in new.failures:
                if budget := self._budgets.get(failure.budget):
                    budget.add(failure.reason, failure.sample)
                    budget.check()
            if new.requests:
                self._requests += new.requests
                self._wanted.set()
            async with self._moved:
                self._idle.update(new.idle)
                self._taken = new.revision
                self._moved.notify_all()

    async def _relay(self) -> None:
        """Tell what the driver's Stream knows: what is released and was deferred, and that it has settled."""
        stream, told = self._stream, BoardState()
        while True:
            revision = stream.revision
            deferred = None if stream.joined is None else len(stream.joined.groups)
            now = BoardState(released=stream.released, deferred=deferred, settled=stream.settled)
            if now != told:
                told = now
                await self._link.call(Board.tell, now)
            await stream.wait(revision)
