"""Rollout, reward and evaluations in shards, from the driver: whether shards do them, and their records as one.

Knows nothing of how shards are started, nor of how they work.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextvars import copy_context

from millrace.connectors.ray.task_runs import REMEDY
from millrace.connectors.storage.files import recorded
from millrace.connectors.storage.parts import list_parts, read_parts
from millrace.core.accounts.staleness import VersionRange
from millrace.core.contracts.ids import iteration_number, sample_id
from millrace.core.contracts.sample import EvaluatedSample
from millrace.core.contracts.task_records import RewardRecord, RolloutRecord
from millrace.core.contracts.topics import Batch, EvaluationTopic
from millrace.core.errors import ConfigError
from millrace.core.sharding import in_shards
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.held_out import KIND, Made, evaluation_budget, made_of, places, write_prompts
from millrace.tasks.reward import OUTCOME, reward_budget
from millrace.tasks.rollout import FAILURE, defer, rollout_budget
from millrace.tasks.shards.attempts import Attempts, RunShard, on_ray
from millrace.tasks.shards.shard import evaluate_shard, reward_shard, rollout_shard
from millrace.tasks.stream import Kind, Stream

log = logging.getLogger(__name__)
WRITTEN: tuple[Kind, ...] = ("rollouts", "turns")  # by shards that generate


@contextlib.asynccontextmanager
async def open_shards(ctx: IterationContext) -> AsyncIterator[IterationContext]:
    """Yields the iteration with shards for rollout and reward, if the configuration says so."""
    if not in_shards(ctx.config) or not await can_start(ctx):
        yield ctx
        return
    sharded = ShardedIteration(ctx, on_ray())
    try:
        yield ctx.working_in(sharded)
    finally:
        await sharded.close()


async def with_evaluation_shards(ctx: IterationContext) -> IterationContext:
    """The iteration with shards for an evaluation, if the configuration says so."""
    if not in_shards(ctx.config) or not await can_start(ctx):
        return ctx
    return ctx.working_in(evaluation_shards=ShardedEvaluation(ctx, on_ray()))


async def can_start(ctx: IterationContext) -> bool:
    """Whether shards can start on all nodes. Raises ConfigError if not, and shards are asked for by name."""
    reason = await ctx.runtime.board.why_not(copy_context())
    if reason is None:
        return True
    if ctx.config.placement.task_runner == "ray":
        raise ConfigError(
            f"Prefect cannot start a shard {reason}",
            where="placement.task_runner = ray",
            remedy=REMEDY,
        )
    log.warning(
        "iteration %d: this process does the work of shards, since Prefect cannot start one %s",
        iteration_number(ctx.index),
        reason,
    )
    return False


class ShardedIteration(Attempts):
    """The shards of one iteration's batch."""

    def __init__(self, ctx: IterationContext, run: RunShard) -> None:
        super().__init__(ctx, Batch(ctx.index), ctx.stream, lambda: ctx.versions, run)

    async def rollout(self) -> RolloutRecord:
        """Have the samples generated until the filter has settled."""
        ctx, started = self._ctx, time.perf_counter()
        await self.note_earlier("rollout", WRITTEN)
        stored = await asyncio.to_thread(ctx.stored_parts, "rollouts", FAILURE)
        await asyncio.to_thread(ctx.stored_parts, "turns", ["rollout_id"])  # a broken part is removed
        side = await self.side()
        side.count_failures("rollout", rollout_budget(ctx, stored.to_pylist()))
        for kind in WRITTEN:
            await asyncio.to_thread(ctx.start_parts, kind)
            await side.count_stored(kind)
        found = set(stored.column("sample_id").to_pylist())
        if await asyncio.to_thread(self._lacks, found):
            side.make_engines_ready()
        await self._stream.begin()
        records = await self.run(side, rollout_shard, "rollout", WRITTEN)
        record: RolloutRecord = {
            "samples_found": len(found),
            "seconds": time.perf_counter() - started,
            "samples_generated": sum(each["samples_generated"] for each in records),
            "tokens_generated": sum(each["tokens_generated"] for each in records),
            "engines_s": side.engines_s,
            "files": [*(file for kind in WRITTEN for file in ctx.parts[kind]), *await defer(ctx)],
        }
        limits = [each["in_flight_limit"] for each in records if "in_flight_limit" in each]
        if limits:
            record["in_flight_limit"] = sum(limits)
        read = [each for each in records if "kv_used" in each and "queue" in each]
        if read:
            record["kv_used"] = max(each["kv_used"] for each in read)
            record["queue"] = max(each["queue"] for each in read)
        return record

    async def reward(self) -> RewardRecord:
        """Have them scored until the filter has settled."""
        ctx = self._ctx
        await self.note_earlier("reward", ["rewards"])
        stored = await asyncio.to_thread(ctx.stored_parts, "rewards", OUTCOME)
        await asyncio.to_thread(ctx.start_parts, "rewards")
        budget = reward_budget(ctx, stored.to_pylist())
        budget.check()
        side = await self.side()
        side.count_failures("reward", budget)
        await side.count_stored("rewards")
        listed = side.counted("rollouts", await asyncio.to_thread(list_parts, ctx.folder, "rollouts"))
        self._stream.add_listed("rollouts", listed)
        await side.show("rollouts", listed)
        records = await self.run(side, reward_shard, "reward", ["rewards"])
        return {
            "scored": sum(record["scored"] for record in records),
            "failed": sum(record["failed"] for record in records),
            "timed_out": sum(record["timed_out"] for record in records),
            "skipped": sum(record["skipped"] for record in records),
            "seconds": max(record["seconds"] for record in records),
            "files": ctx.parts["rewards"],
        }

    def _lacks(self, found: set[str]) -> bool:
        """Whether a sample of the groups that are released is not generated yet."""
        ctx = self._ctx
        columns = ["group_id", "ordinal", "unusable"]
        table = ctx.folder.read_table("prompts.parquet", "prompts", columns=columns)
        return any(
            sample_id(row["group_id"], index) not in found
            for row in table.to_pylist()
            if row["unusable"] is None and row["ordinal"] < self._stream.released
            for index in range(ctx.config.rollout.samples_per_prompt)
        )


class ShardedEvaluation:
    """The shards of one evaluation."""

    def __init__(self, ctx: IterationContext, run: RunShard) -> None:
        self._ctx, self._run = ctx, run

    async def make(
        self, evaluation: EvaluationTopic, made: Mapping[tuple[str, int], EvaluatedSample]
    ) -> Made:
        """All samples of all sets. Raises BudgetError naming the set of which too many fail to generate."""
        ctx = self._ctx
        sets = [(each, ctx.runtime.prompts.held_out(each).usable) for each in ctx.config.evaluation.sets]
        if all(place in made for each, prompts in sets for place in places(each, prompts)):
            return dict(made)
        await asyncio.to_thread(write_prompts, ctx, evaluation)
        versions = VersionRange.only(evaluation.version)
        stream = Stream(released=0, limit=ctx.config.run_limit)
        shards = Attempts(ctx, evaluation, stream, lambda: versions, self._run)
        try:
            side = await shards.side()
            for each, prompts in sets:
                side.count_failures(each.name, evaluation_budget(ctx, evaluation, each, len(prompts)))
            await side.count_stored(KIND)
            side.make_engines_ready()
            await shards.run(side, evaluate_shard, "evaluate", [KIND])
        finally:
            await shards.close()
        return made_of(await asyncio.to_thread(self._stored), evaluation.version, failed=True)

    def _stored(self) -> list[EvaluatedSample]:
        entries = recorded(self._ctx.parts[KIND], self._ctx.folder.url)
        table = read_parts(self._ctx.folder, KIND, KIND, entries=entries)
        return [EvaluatedSample(**row) for row in table.to_pylist()]
