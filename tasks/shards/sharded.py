"""Rollout and reward of one iteration in shards: started as Ray tasks, started again where they die, and their records as one.

Owns the attempts of shards, and that a part counts once: what a shard wrote before it died counts, what an attempt that was
replaced writes later is removed. Knows nothing of how a shard works.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from itertools import count
from typing import Any, Literal, TypeVar

from prefect import Task

from millrace.connectors.ray.task_runs import REMEDY, run_on_ray
from millrace.connectors.storage.parts import list_parts
from millrace.connectors.storage.run_folder import CUT
from millrace.core.contracts.ids import iteration_number, sample_id
from millrace.core.contracts.task_records import RewardRecord, RolloutRecord
from millrace.core.errors import ActorLostError, ConfigError, only_first_error
from millrace.core.pipeline.sharding import PlacedShare, in_shards, shares
from millrace.tasks.context import IterationContext
from millrace.tasks.reward import OUTCOME, UNSCORED, reward_budget
from millrace.tasks.rollout import FAILURE, rollout_budget
from millrace.tasks.run_recorded import after_tries
from millrace.tasks.shards.board import Work, Writer
from millrace.tasks.shards.conversation import Conversation
from millrace.tasks.shards.shard import ShardCall, reward_shard, rollout_shard
from millrace.tasks.stream import Kind

log = logging.getLogger(__name__)
STARTS = 3  # of a shard, in one try of its task
Record = TypeVar("Record")
RunShard = Callable[[Task[[ShardCall], Any], ShardCall, Context, str | None], Awaitable[Any]]


@contextlib.asynccontextmanager
async def open_shards(ctx: IterationContext) -> AsyncIterator[None]:
    """Within, rollout and reward of the iteration work in shards, where the configuration says so.

    Groups that the iteration before deferred are gone on with by the driver: that iteration had pipeline.select=finish.
    """
    deferred = bool(ctx.index) and ctx.run_folder.iteration(ctx.index - 1)
    if (
        not in_shards(ctx.config)
        or (deferred and await asyncio.to_thread(deferred.exists, CUT))
        or not await _can_begin(ctx)
    ):
        yield
        return
    sharded = ShardedIteration(ctx)
    ctx.shards = sharded
    try:
        yield
    finally:
        await sharded.close()


async def _can_begin(ctx: IterationContext) -> bool:
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
        "iteration %d: rollout and reward work in this process, since Prefect cannot begin a shard %s",
        iteration_number(ctx.index),
        reason,
    )
    return False


class ShardedIteration:
    """The shards of one iteration. Made outside of its tasks, in the context of its flow run."""

    def __init__(self, ctx: IterationContext, run: RunShard = run_on_ray) -> None:
        """run: runs a shard to its end on a node, or raises ActorLostError where it dies."""
        self._ctx, self._run_shard = ctx, run
        self._flow = copy_context()
        self._opening = asyncio.Lock()
        self._talk: Conversation | None = None

    async def close(self) -> None:
        """Give up what still works."""
        if self._talk:
            await self._talk.close()

    async def rollout(self) -> RolloutRecord:
        """Have the samples generated until the filter has settled."""
        ctx, started = self._ctx, time.perf_counter()
        stored = await asyncio.to_thread(ctx.stored_parts, "rollouts", FAILURE)
        await asyncio.to_thread(ctx.start_parts, "rollouts")
        failed = [row for row in stored.to_pylist() if row["status"] == "failed"]
        budget = rollout_budget(ctx)
        for row in failed:
            budget.add(row["reason"], row["sample_id"])
        talk = await self._conversation()
        talk.count_failures("rollout", budget, [row["sample_id"] for row in failed])
        await self._count_stored(talk, "rollouts")
        found = set(stored.column("sample_id").to_pylist())
        if await asyncio.to_thread(self._lacks, found):
            talk.make_engines_ready()
        records = await self._run(talk, rollout_shard, "rollout", "rollouts")
        return {
            "samples_found": len(found),
            "seconds": time.perf_counter() - started,
            "samples_generated": sum(record["samples_generated"] for record in records),
            "tokens_generated": sum(record["tokens_generated"] for record in records),
            "engines_s": talk.engines_s,
            "files": ctx.parts["rollouts"],
        }

    async def reward(self) -> RewardRecord:
        """Have them scored until the filter has settled."""
        ctx = self._ctx
        assert ctx.stream is not None
        stored = await asyncio.to_thread(ctx.stored_parts, "rewards", OUTCOME)
        await asyncio.to_thread(ctx.start_parts, "rewards")
        failed = [row for row in stored.to_pylist() if row["scoring"] in UNSCORED]
        budget = reward_budget(ctx)
        for row in failed:
            budget.add(row["reason"] or row["scoring"], row["sample_id"])
        budget.check()
        talk = await self._conversation()
        talk.count_failures("reward", budget, [row["sample_id"] for row in failed])
        await self._count_stored(talk, "rewards")
        listed = talk.counted("rollouts", await asyncio.to_thread(list_parts, ctx.folder, "rollouts"))
        ctx.stream.add_listed("rollouts", listed)
        await talk.show("rollouts", listed)
        records = await self._run(talk, reward_shard, "reward", "rewards")
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
        return self._talk.counted(kind, listed) if self._talk else list(listed)

    async def _conversation(self) -> Conversation:
        """The conversation with the shards; a new one where the board was lost."""
        async with self._opening:
            if self._talk and self._talk.failed:
                await self._talk.close()
                self._talk = None
            if self._talk is None:
                keeper = self._ctx.runtime.board
                talk = Conversation(self._ctx, await keeper.board(), keeper.token)
                await talk.open()
                self._talk = talk
            return self._talk

    async def _count_stored(self, talk: Conversation, kind: Kind) -> None:
        """Count the parts that the context lists."""
        assert self._ctx.stream is not None
        files = self._ctx.parts[kind]
        self._ctx.stream.add_listed(kind, [file["path"] for file in files])
        await talk.know(kind, files)

    def _lacks(self, found: set[str]) -> bool:
        """Whether a sample of the groups that are released is not generated yet."""
        ctx = self._ctx
        assert ctx.stream is not None
        columns = ["group_id", "ordinal", "unusable"]
        table = ctx.folder.read_table("prompts.parquet", "prompts", columns=columns)
        return any(
            sample_id(row["group_id"], index) not in found
            for row in table.to_pylist()
            if row["unusable"] is None and row["ordinal"] < ctx.stream.released
            for index in range(ctx.config.rollout.samples_per_prompt)
        )

    async def _run(
        self,
        talk: Conversation,
        task: Task[[ShardCall], Coroutine[Any, Any, Record]],
        work: Work,
        kind: Literal["rollouts", "rewards"],
    ) -> list[Record]:
        """Run all shards of one kind of work to their end; their records."""
        placed = shares(await self._ctx.runtime.board.nodes(), self._ctx.config.rollout.shards)
        with only_first_error():
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._shard(talk, task, work, kind, number, each))
                    for number, each in enumerate(placed)
                ]
                watching = group.create_task(talk.until_failed())
                records = list(await asyncio.gather(*running))
                watching.cancel()
        await talk.catch_up()
        await self._remove_strays(talk, kind)
        return records

    async def _shard(
        self,
        talk: Conversation,
        task: Task[[ShardCall], Coroutine[Any, Any, Record]],
        work: Work,
        kind: Kind,
        number: int,
        placed: PlacedShare,
    ) -> Record:
        """Run one shard to its end, again where its process or node dies."""
        ctx, keeper = self._ctx, self._ctx.runtime.board
        for start in count(1):
            writer: Writer = await talk.begin(work, number)
            limit = ctx.config.part_limit
            call = ShardCall(keeper.token, ctx.index, writer, placed.share, ctx.versions, limit)
            try:
                record: Record = await self._run_shard(task, call, self._flow, placed.node)
                return record
            except ActorLostError as error:
                if start == STARTS or talk.failed:
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
                await self._take_in_written(talk, kind)
            except BaseException:
                await talk.end(writer)
                raise
        raise AssertionError("the last start returns or raises")

    async def _take_in_written(self, talk: Conversation, kind: Kind) -> None:
        """Count what a shard that died had written and not told."""
        await talk.catch_up()
        for path in await self._uncounted(talk, kind):
            entry = await asyncio.to_thread(self._ctx.folder.entry, path)
            await talk.take_in(kind, entry.record())
            await talk.show(kind, [path])

    async def _remove_strays(self, talk: Conversation, kind: Kind) -> None:
        """Remove parts of attempts that were replaced before they told of them: another attempt has made their samples."""
        for path in await self._uncounted(talk, kind):
            log.warning(
                "removing %s: the shard that wrote it had been replaced", self._ctx.folder.url_of(path)
            )
            await asyncio.to_thread(self._ctx.folder.remove, path)

    async def _uncounted(self, talk: Conversation, kind: Kind) -> Sequence[str]:
        listed = await asyncio.to_thread(list_parts, self._ctx.folder, kind)
        return [path for path in listed if not talk.counts(kind, path)]
