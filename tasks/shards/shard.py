"""rollout_shard, reward_shard, evaluate_shard: one shard's share of a task, as a Ray task near its engines.

Runs in a worker process of Ray's, which keeps what it has built for the next iteration. Writes parts under the driver's lease; what
it knows of the others it has from the board: a Stream that follows the driver's, and the engines that the driver makes ready. Holds
no state that storage does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import count
from typing import get_args

import pyarrow as pa
import ray
from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace.connectors.engines.client import Connect, EngineClient
from millrace.connectors.engines.dispatcher import Dispatcher, EngineAddress, until_changed
from millrace.connectors.engines.kinds import connect_to
from millrace.connectors.host.garbage import collect_garbage, collect_whole_when_asked, use_few_heaps
from millrace.connectors.host.local_files import keep_private
from millrace.connectors.ray import actors
from millrace.connectors.ray.cluster import node_address
from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.lease import PassedLease
from millrace.connectors.storage.store import Store
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.ids import rollout_of
from millrace.core.contracts.sample import EvaluatedSample
from millrace.core.contracts.task_records import FileRecord, RewardRecord, RolloutRecord
from millrace.core.contracts.topics import EvaluationTopic
from millrace.core.errors import EngineError, EngineLostError, EngineStalledError, together
from millrace.core.hooks.loading import search_in
from millrace.core.plain_text import take_any_text
from millrace.tasks.batching.deferred_groups import deferred_to
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.held_out import KIND, make_share
from millrace.tasks.reward import score_landing
from millrace.tasks.rollout import generate
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.shards.board import (
    BOARD,
    CALL_S,
    Attempt,
    Board,
    BoardState,
    EngineReply,
    EngineRequest,
    EnginesState,
    Facts,
    Failure,
    Idle,
    Link,
    LostEngine,
    Part,
    ShardCall,
    ShardReplacedError,
)
from millrace.tasks.stream import NOTHING, Kind, Stream

TIDY_AFTER_S = 0.1  # for Ray to send the record


@task(name="rollout_shard", cache_policy=NO_CACHE)
async def rollout_shard(call: ShardCall) -> RolloutRecord:
    """Generate a share of the iteration's groups until the filter has settled; the record names no parts."""
    async with _context(call) as ctx:
        return await make_rollouts(ctx)


@task(name="reward_shard", cache_policy=NO_CACHE)
async def reward_shard(call: ShardCall) -> RewardRecord:
    """Score the samples of a share of the groups until the filter has settled; the record names no parts."""
    async with _context(call) as ctx:
        return await make_rewards(ctx)


@task(name="evaluate_shard", cache_policy=NO_CACHE)
async def evaluate_shard(call: ShardCall) -> None:
    """Generate and score a share of the prompts of the held-out sets."""
    async with _context(call) as ctx:
        await make_evaluation(ctx)


async def make_rollouts(ctx: ShardContext) -> RolloutRecord:
    """What `rollout_shard` does in its context."""
    record = await generate(ctx)
    record["files"] = []
    return record


async def make_rewards(ctx: ShardContext) -> RewardRecord:
    """What `reward_shard` does in its context."""
    await ctx.stream.until_joined()
    record = await score_landing(ctx, await asyncio.to_thread(ctx.own_groups))
    record["files"] = []
    return record


async def make_evaluation(ctx: ShardContext) -> None:
    """What `evaluate_shard` does in its context."""
    assert isinstance(ctx.topic, EvaluationTopic)
    stored = await asyncio.to_thread(ctx.stored_parts, KIND)
    await make_share(ctx, ctx.topic, [EvaluatedSample(**row) for row in stored.to_pylist()])


class ShardContext(IterationContext):
    """An iteration as one shard sees it."""

    def __init__(self, runtime: Runtime, call: ShardCall, stream: ShardStream, address: str) -> None:
        """address: of this node."""
        super().__init__(runtime, call.topic.index, stream, share=call.share, in_shard=True)
        self.folder.attempt = call.attempt.number
        self.topic = call.topic
        self._versions = call.versions
        self._followed, self._address = stream, address
        self._failures: list[Failure] = []

    @property
    def versions(self) -> VersionRange:
        """As the driver says: how far a run goes ahead may change in its course."""
        return self._versions

    def own_groups(self) -> frozenset[str]:
        """The groups of its share, with the groups that were deferred to the iteration."""
        table = self.folder.read_table("prompts.parquet", "prompts", columns=["group_id", "ordinal"])
        places = {row["group_id"]: row["ordinal"] for row in table.to_pylist()}
        joined = self._followed.joined or NOTHING
        places |= {group.group_id: group.ordinal for group in joined.groups}
        return frozenset(group_id for group_id, ordinal in places.items() if self.share.holds(ordinal))

    async def receive_deferred(self) -> None:
        """Have the shard's work know what was deferred to the iteration, once the driver does."""
        groups = await self._followed.until_deferral_known()
        await self._followed.join(await asyncio.to_thread(deferred_to, self) if groups else NOTHING)

    def start_parts(self, folder: str) -> None:
        """The driver has the list of all parts."""
        self.parts[folder] = []

    def stored_parts(self, folder: str, columns: list[str] | None = None) -> pa.Table:
        """Rows of the parts that the driver found or this shard wrote."""
        paths = self.listed_parts(folder)
        tables = [self.folder.read_table(path, folder, columns=columns) for path in paths]
        empty = schema.schema(folder).empty_table()
        return pa.concat_tables([empty.select(columns) if columns else empty, *tables])

    def listed_parts(self, folder: str) -> list[str]:
        """Paths of these parts."""
        return self._followed.parts(next(kind for kind in get_args(Kind) if kind == folder))

    async def announce(self, kind: Kind, entry: FileEntry) -> None:
        """Let the driver know of a part, and of the samples that failed until now."""
        failures, self._failures = self._failures, []
        await self._followed.tell_landed(kind, entry.record(), failures)

    def note_failure(self, budget: str, reason: str, sample: str) -> None:
        """Tell the driver with the next part. sample: also a turn of it."""
        self._failures.append(Failure(budget, reason, rollout_of(sample)))

    async def engines_at(self, versions: VersionRange) -> Dispatcher:
        """The engines that the driver makes ready, this node's first."""
        return await self._followed.engines.dispatcher(self.config, versions, self._address)


class ShardStream(Stream):
    """The driver's Stream as a shard sees it. It has the parts that the driver listed, and the parts of shards with this number."""

    def __init__(self, link: Link, attempt: Attempt, connect: Connect) -> None:
        super().__init__(released=0, joined=None)
        self.engines = ShardEngines(link, attempt, connect)
        self._deferred: int | None = None
        self._link, self._attempt = link, attempt
        self._taken = 0  # revision up to which the state was taken over

    async def follow(self) -> None:
        """Take over what the driver tells; runs until cancelled, or this attempt counts no more."""
        while True:
            await self.catch_up(CALL_S)

    async def catch_up(self, timeout_s: float = 0.0) -> None:
        """Take over what was told so far; waits so long for something."""
        new = await self._link.call(Board.wait, self._taken, timeout_s, self._attempt)
        self._taken = new.revision
        for part in new.parts:
            if part.shard in (None, self._attempt.shard):
                await self.land(part.kind, part.path)
        if new.deferred is not None:
            self._deferred = new.deferred
            await self._notify()
        await self.release(new.released)
        if new.settled:
            await self.settle()
        await self.engines.take(new.engines)

    async def until_deferral_known(self) -> int:
        """How many groups the iteration before deferred, once that is known."""
        await self._until(lambda: self._deferred is not None, "what the iteration before defers")
        assert self._deferred is not None
        return self._deferred

    async def tell_landed(self, kind: Kind, file: FileRecord, failures: Sequence[Failure] = ()) -> None:
        """Announce a part that this shard wrote, to the driver and here, and samples that failed until now."""
        part = Part(kind, file["path"], self._attempt.shard, file)
        update = BoardState(parts=(part,), failures=tuple(failures))
        await self._link.call(Board.tell, update, self._attempt)
        await self.land(kind, file["path"])


class ShardEngines:
    """The engines that the driver makes ready. It alone starts, checks and replaces them, and is told which lost a request."""

    def __init__(self, link: Link, attempt: Attempt, connect: Connect) -> None:
        self._link, self._attempt, self._connect = link, attempt, connect
        self._known = EnginesState()
        self._clients: dict[str, EngineClient] = {}  # by URL
        self._suspect: set[str] = set()  # URLs
        self._lost: list[LostEngine] = []
        self._changes = 0  # of any of these
        self._numbers = count(1)
        self._replies: dict[int, EngineReply] = {}
        self._changed = asyncio.Condition()

    async def dispatcher(self, config: RunConfig, versions: VersionRange, address: str) -> Dispatcher:
        """A dispatcher over the engines at one of these versions; the engines at this address first, the shard's node."""

        async def recover(_: int) -> None:
            await self._ask()

        await self._ask()
        return Dispatcher(
            until_changed(lambda: self._changes, partial(self._near, address)),
            recover,
            self._mark_suspect,
            version=versions.newest,
            oldest=versions.oldest,
            newest=versions.newest,
            keyed=False,
            attempts=config.rollout.attempts,
            progress_timeout_s=config.rollout.progress_timeout_s,
        )

    async def take(self, engines: EnginesState) -> None:
        """Take over what the driver says, unless it is known. What engines end while they are given weights goes on after it."""
        if engines.number <= self._known.number:
            return
        before, self._known = self._known, engines
        old = self._clients
        for client in old.values():
            if engines.updates > before.updates:
                client.note_refit()
            client.refits_amid_requests += engines.updates_amid - before.updates_amid
        self._clients = {each.url: self._client(each, old.get(each.url)) for each in engines.serving}
        replies = {each.number: each for each in engines.replies if each.attempt == self._attempt}
        if len(replies) > len(self._replies):
            self._suspect.clear()
        self._replies = replies
        self._changes += 1
        kept = self._clients.values()
        await asyncio.gather(*(client.close() for client in old.values() if client not in kept))
        if engines.updating:
            idle = Idle(self._attempt, engines.updates)
            await self._link.call(Board.tell, BoardState(idle=(idle,)), self._attempt)
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def _ask(self) -> None:
        """Have the driver make engines ready. Raises EngineError if it cannot."""
        number, lost, self._lost = next(self._numbers), tuple(self._lost), []
        request = EngineRequest(self._attempt, number, lost)
        await self._link.call(Board.tell, BoardState(requests=(request,)), self._attempt)
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._replies)
        reason = self._replies[number].reason
        if reason is not None:
            raise EngineError(reason)

    def _near(self, address: str) -> list[EngineClient]:
        if self._known.updating:
            return []
        serving = {url: client for url, client in self._clients.items() if url not in self._suspect}
        near = [client for url, client in serving.items() if f"//{address}:" in url]
        return near or list(serving.values())

    def _client(self, engine: EngineAddress, held: EngineClient | None) -> EngineClient:
        """A client of the engine: the held one, if it has the same key."""
        if held and held.key == engine.key:
            return held
        return self._connect(engine.url, engine.engine_id, engine.key)

    def _mark_suspect(self, client: EngineClient, error: EngineLostError) -> None:
        if client.url not in self._suspect:
            self._suspect.add(client.url)
            self._changes += 1
            stalled = isinstance(error, EngineStalledError)
            self._lost.append(LostEngine(client.engine_id, client.url, str(error), stalled))


@contextlib.asynccontextmanager
async def _context(call: ShardCall) -> AsyncIterator[ShardContext]:
    """The shard's context in a worker process of Ray's."""
    board = actors.find(BOARD, 0, Board, limit=call.limit)
    if board is None:
        raise ShardReplacedError("the board of the run is gone")
    runtime = await _runtime(board, call.token)
    try:
        async with shard_context(call, board, runtime, node_address()) as ctx:
            yield ctx
    finally:
        runtime.sessions.close()  # its processes are heard in the event loop that this task has for itself
        # What this process's share of an iteration left: when the driver has its record, which would else come later
        threading.Timer(TIDY_AFTER_S, gc.collect).start()


@contextlib.asynccontextmanager
async def shard_context(
    call: ShardCall, board: actors.Actor[Board], runtime: Runtime, address: str
) -> AsyncIterator[ShardContext]:
    """The shard's context; within, it follows the board. Left with an error once this attempt counts no more."""
    connect = connect_to(runtime.config.engines)
    stream = ShardStream(Link(board, call.token, call.topic), call.attempt, connect)
    try:
        await stream.catch_up()
        ctx = await asyncio.to_thread(ShardContext, runtime, call, stream, address)
        async with together() as group:
            beside = [group.create_task(work) for work in (stream.follow(), ctx.receive_deferred())]
            yield ctx
            for work in beside:
                work.cancel()
    finally:
        await stream.engines.close()


_kept: tuple[int, str, Runtime] | None = None  # of the driver with this token, by the run's id


async def _runtime(board: actors.Actor[Board], token: int) -> Runtime:
    """The run's runtime in this process: that of the shard before if there was one."""
    global _kept  # noqa: PLW0603 - Ray keeps the process, and this is what it keeps for the next task
    facts = await board.call(Board.facts, token)
    if _kept is None or _kept[:2] != (facts.token, facts.run_id):
        if _kept:
            _kept[2].scoring.close()
        _kept = (facts.token, facts.run_id, _build(facts))
    return _kept[2]


def _build(facts: Facts) -> Runtime:
    """Prompts and scoring of the run. Trainer and engines are the driver's."""
    keep_private()
    take_any_text()
    os.environ.update(facts.environment)
    os.environ["MILLRACE_RUN"] = ray.get_runtime_context().namespace
    with contextlib.suppress(OSError):  # another host may lack it
        os.chdir(facts.folder)
    config = RunConfig.model_validate(facts.settings)
    search_in(config.run.import_from)
    runtime = Runtime(config)
    store = runtime.run_folder.store
    store.fence = PassedLease(Store(store.url), facts.token)
    runtime.run_folder.owner.drive_as(facts.run_id)
    runtime.prompts.tokenizer_kind = facts.tokenizer_kind
    _ = runtime.prompts.tokenizer  # takes a second to import, and any process may be the next to generate
    use_few_heaps()
    collect_whole_when_asked()
    collect_garbage()
    return runtime
