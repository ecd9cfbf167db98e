"""rollout_shard, reward_shard, evaluate_shard: one shard's share of a task, as a Ray task near its engines.

Runs in a worker process of Ray's, which keeps what it has built for the next iteration. Writes parts under the driver's lease; what
it knows of the others it has from the board. Holds no state that storage does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any, get_args

import pyarrow as pa
import ray
from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace.connectors.ray import actors
from millrace.connectors.ray.cluster import node_address
from millrace.connectors.sglang.dispatcher import Dispatcher
from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.lease import PassedLease
from millrace.connectors.storage.local import keep_private
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.ids import rollout_of
from millrace.core.contracts.sample import EvaluatedSample
from millrace.core.contracts.task_records import RewardRecord, RolloutRecord
from millrace.core.errors import only_first_error
from millrace.core.garbage import collect_garbage, collect_whole_when_asked, use_few_heaps
from millrace.core.hooks import search_in
from millrace.core.plain_text import take_any_text
from millrace.core.staleness import VersionRange
from millrace.tasks.context import Evaluation, IterationContext
from millrace.tasks.reward import score_landing
from millrace.tasks.rollout import generate
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.samples.held_out import KIND, make_share
from millrace.tasks.samples.joined_groups import deferred_to
from millrace.tasks.shards.board import Board, Facts, Failed, Seat, ShardCall, ShardReplacedError
from millrace.tasks.shards.keeper import BOARD
from millrace.tasks.shards.mirror import LOOK_S, Link, MirroredStream
from millrace.tasks.stream import NOTHING, Kind

TIDY_AFTER_S = 0.1  # for Ray to send the record


@task(name="rollout_shard", cache_policy=NO_CACHE)
async def rollout_shard(call: ShardCall | Seat) -> RolloutRecord:
    """Generate a share of the iteration's groups until the filter has settled; the record names no parts."""
    async with _context(call) as ctx:
        return await make_rollouts(ctx)


@task(name="reward_shard", cache_policy=NO_CACHE)
async def reward_shard(call: ShardCall | Seat) -> RewardRecord:
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
    assert ctx.stream is not None
    await ctx.stream.until_joined()
    ctx.mine = await asyncio.to_thread(ctx.own_groups)
    record = await score_landing(ctx)
    record["files"] = []
    return record


async def make_evaluation(ctx: ShardContext) -> None:
    """What `evaluate_shard` does in its context."""
    assert isinstance(ctx.topic, Evaluation)
    stored = await asyncio.to_thread(ctx.stored_parts, KIND)
    await make_share(ctx, ctx.topic, [EvaluatedSample(**row) for row in stored.to_pylist()])


class ShardContext(IterationContext):
    """An iteration as one shard sees it."""

    def __init__(self, runtime: Runtime, call: ShardCall, stream: MirroredStream, address: str) -> None:
        """address: of this node."""
        super().__init__(runtime.config, call.topic.index, runtime, stream)
        self.in_shard = True
        self.folder.attempt = call.writer.attempt
        self.topic, self.share = call.topic, call.share
        self._versions = call.versions
        self._mirror, self._address = stream, address
        self._failures: list[Failed] = []

    @property
    def versions(self) -> VersionRange:
        """As the driver says: how far a run goes ahead may change in its course."""
        return self._versions

    def own_groups(self) -> frozenset[str]:
        """The groups of its share, of those that were deferred to the iteration too."""
        table = self.folder.read_table("prompts.parquet", "prompts", columns=["group_id", "ordinal"])
        places = {row["group_id"]: row["ordinal"] for row in table.to_pylist()}
        joined = self._mirror.joined or NOTHING
        places |= {group.group_id: group.ordinal for group in joined.groups}
        return frozenset(group_id for group_id, ordinal in places.items() if self.share.holds(ordinal))

    async def receive_deferred(self) -> None:
        """Have the shard's work know what was deferred to the iteration, once the driver does."""
        groups = await self._mirror.until_deferral_known()
        await self._mirror.join(await asyncio.to_thread(deferred_to, self) if groups else NOTHING)

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
        return self._mirror.parts(next(kind for kind in get_args(Kind) if kind == folder))

    async def announce(self, kind: Kind, entry: FileEntry) -> None:
        """Let the driver know of a part, and of the samples that failed until now."""
        failures, self._failures = self._failures, []
        await self._mirror.tell_failed(failures)
        await self._mirror.tell_landed(kind, entry.record())

    def note_failure(self, budget: str, reason: str, sample: str) -> None:
        """Tell the driver with the next part. sample: also a turn of it."""
        self._failures.append(Failed(budget, reason, rollout_of(sample)))

    async def engines_at(self, versions: VersionRange) -> Dispatcher:
        """The engines that the driver makes ready, those of this node first."""
        return await self._mirror.engines.dispatcher(self.config, versions, self._address)


@contextlib.asynccontextmanager
async def _context(asked: ShardCall | Seat) -> AsyncIterator[ShardContext]:
    """The shard's context in a worker process of Ray's. At a seat, once there is a call for it."""
    board = actors.find(BOARD, 0, Board, limit=asked.limit)
    if board is None:
        raise ShardReplacedError("the board of the run is gone")
    runtime = await _runtime(board, asked.token)
    call = await called_to(board, asked) if isinstance(asked, Seat) else asked
    try:
        async with shard_context(call, board, runtime, node_address()) as ctx:
            yield ctx
    finally:
        runtime.sessions.close()  # its processes are heard in the event loop that this task has for itself
        # What this process's share of an iteration left: when the driver has its record, which would else come later
        threading.Timer(TIDY_AFTER_S, gc.collect).start()


async def called_to(board: actors.Actor[Board], seat: Seat) -> ShardCall:
    """Wait at a seat for its call. Raises ShardReplacedError where there will be none."""
    while True:
        call = await board.call(Board.called, seat, LOOK_S)
        if call is not None:
            return call


@contextlib.asynccontextmanager
async def shard_context(
    call: ShardCall, board: actors.Actor[Board], runtime: Runtime, address: str
) -> AsyncIterator[ShardContext]:
    """The shard's context; within, it follows the board. Left with an error once this attempt counts no more."""
    stream = MirroredStream(Link(board, call.token, call.topic, call.writer))
    try:
        await stream.catch_up()
        ctx = await asyncio.to_thread(ShardContext, runtime, call, stream, address)
        with only_first_error():
            async with _beside(stream.follow(), ctx.receive_deferred()):
                yield ctx
    finally:
        await stream.engines.close()


@contextlib.asynccontextmanager
async def _beside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(work) for work in works]
        yield
        for task in running:
            task.cancel()


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
    runtime.prompts.use_seed_name(facts.seed_name)
    runtime.prompts.tokenizer_kind = facts.tokenizer_kind
    _ = runtime.prompts.tokenizer  # takes a second to import, and any process may be the next to generate
    use_few_heaps()
    collect_whole_when_asked()
    collect_garbage()
    return runtime
