"""Rollout and reward of one iteration in shards, and their records as one; where shards are taken.

Knows nothing of how shards are started, nor of how they work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextvars import copy_context

from millrace.connectors.ray.task_runs import REMEDY
from millrace.connectors.storage.parts import list_parts
from millrace.core.contracts.ids import iteration_number, sample_id
from millrace.core.contracts.task_records import RewardRecord, RolloutRecord
from millrace.core.errors import ConfigError
from millrace.core.pipeline.sharding import in_shards
from millrace.tasks.context import IterationContext
from millrace.tasks.reward import OUTCOME, reward_budget
from millrace.tasks.rollout import FAILURE, defer, rollout_budget
from millrace.tasks.shards.attempts import Attempts, RunShard
from millrace.tasks.shards.board import Batch
from millrace.tasks.shards.shard import reward_shard, rollout_shard
from millrace.tasks.stream import Kind

log = logging.getLogger(__name__)
WRITTEN: tuple[Kind, ...] = ("rollouts", "turns")  # by shards that generate


@contextlib.asynccontextmanager
async def open_shards(ctx: IterationContext, run: RunShard) -> AsyncIterator[None]:
    """Within, rollout and reward of the iteration work in shards, where the configuration says so. run: runs one."""
    if not in_shards(ctx.config) or not await can_begin(ctx):
        yield
        return
    sharded = ShardedIteration(ctx, run)
    ctx.shards = sharded
    try:
        yield
    finally:
        await sharded.close()


async def can_begin(ctx: IterationContext) -> bool:
    """Whether shards can begin on all nodes. Raises ConfigError if not, where shards are asked for by name."""
    reason = await ctx.runtime.board.why_not(copy_context())
    if reason is None:
        return True
    if ctx.config.placement.task_runner == "ray":
        raise ConfigError(
            f"Prefect cannot begin a shard {reason}",
            where="placement.task_runner = ray",
            remedy=REMEDY,
        )
    log.warning(
        "iteration %d: this process does the work of shards, since Prefect cannot begin one %s",
        iteration_number(ctx.index),
        reason,
    )
    return False


class ShardedIteration:
    """The shards of one iteration's batch."""

    def __init__(self, ctx: IterationContext, run: RunShard) -> None:
        assert ctx.stream is not None
        self._ctx, self._stream = ctx, ctx.stream
        self._shards = Attempts(ctx, Batch(ctx.index), ctx.stream, lambda: ctx.versions, run)

    async def close(self) -> None:
        """Give up what still works."""
        await self._shards.close()

    async def rollout(self) -> RolloutRecord:
        """Have the samples generated until the filter has settled."""
        ctx, started = self._ctx, time.perf_counter()
        await self._shards.note_earlier("rollout", WRITTEN)
        stored = await asyncio.to_thread(ctx.stored_parts, "rollouts", FAILURE)
        await asyncio.to_thread(ctx.stored_parts, "turns", ["rollout_id"])  # a broken part is removed
        talk = await self._shards.conversation()
        talk.count_failures("rollout", rollout_budget(ctx, stored.to_pylist()))
        for kind in WRITTEN:
            await asyncio.to_thread(ctx.start_parts, kind)
            await self._shards.count_stored(talk, kind)
        found = set(stored.column("sample_id").to_pylist())
        if await asyncio.to_thread(self._lacks, found):
            talk.make_engines_ready()
        await self._stream.begin()
        records = await self._shards.run(talk, rollout_shard, "rollout", WRITTEN)
        return {
            "samples_found": len(found),
            "seconds": time.perf_counter() - started,
            "samples_generated": sum(record["samples_generated"] for record in records),
            "tokens_generated": sum(record["tokens_generated"] for record in records),
            "engines_s": talk.engines_s,
            "files": [*(file for kind in WRITTEN for file in ctx.parts[kind]), *await defer(ctx)],
        }

    async def reward(self) -> RewardRecord:
        """Have them scored until the filter has settled."""
        ctx = self._ctx
        await self._shards.note_earlier("reward", ["rewards"])
        stored = await asyncio.to_thread(ctx.stored_parts, "rewards", OUTCOME)
        await asyncio.to_thread(ctx.start_parts, "rewards")
        budget = reward_budget(ctx, stored.to_pylist())
        budget.check()
        talk = await self._shards.conversation()
        talk.count_failures("reward", budget)
        await self._shards.count_stored(talk, "rewards")
        listed = talk.counted("rollouts", await asyncio.to_thread(list_parts, ctx.folder, "rollouts"))
        self._stream.add_listed("rollouts", listed)
        await talk.show("rollouts", listed)
        records = await self._shards.run(talk, reward_shard, "reward", ["rewards"])
        return {
            "scored": sum(record["scored"] for record in records),
            "failed": sum(record["failed"] for record in records),
            "timed_out": sum(record["timed_out"] for record in records),
            "skipped": sum(record["skipped"] for record in records),
            "seconds": max(record["seconds"] for record in records),
            "files": ctx.parts["rewards"],
        }

    def counted(self, kind: Kind, listed: Sequence[str]) -> list[str]:
        """Of the parts that a listing shows, those that count."""
        return self._shards.counted(kind, listed)

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
