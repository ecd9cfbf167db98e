"""An iteration whose samples land group by group, with the tasks that pass chunks meanwhile and no engine, Ray or Prefect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from millrace.connectors.storage.parts import write_part
from millrace.connectors.trainers.chunks import hash_of
from millrace.connectors.trainers.packing import cut_into, read_rows
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.sample import GeneratedSample, ScoredSample
from millrace.tasks.batching.eager_passes import eager_passes
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import filter_groups
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Joined, Stream
from tests.support.stored_samples import drawn_group, sample_of

NEED, EACH, DRAWN = 6, 4, 8
DROPPED = 1  # the group whose rewards are all equal


class Iteration:
    """An iteration of a run that needs NEED of DRAWN groups, whose samples land group by group."""

    def __init__(self, config: RunConfig, ranks: Any, index: int = 1) -> None:
        """ranks: a Trainer, or what stands for one."""
        self.ranks = ranks
        runtime = Runtime(config)
        runtime.memory._trainer = ranks
        self.ctx = ctx = IterationContext(runtime, index, Stream(released=DRAWN, joined=Joined()))
        groups = [drawn_group(number, iteration=index) for number in range(DRAWN)]
        ctx.folder.write_table("prompts.parquet", schema.to_table(groups, "prompts"), "prompts")

    async def land(self, number: int) -> None:
        """A group's samples, then their scores."""
        made = [self._sample(number, index) for index in range(EACH)]
        part = write_part(self.ctx.folder, "rollouts", schema.to_table(made, "rollouts"), "rollouts")
        await self.ctx.announce("rollouts", part)
        scored = [_score(made[index], float(index == 0 or number == DROPPED)) for index in range(EACH)]
        part = write_part(self.ctx.folder, "rewards", schema.to_table(scored, "rewards"), "rewards")
        await self.ctx.announce("rewards", part)

    def _sample(self, number: int, index: int) -> GeneratedSample:
        spans = [{"first_token": 0, "version": self.ctx.version_before}]
        group = drawn_group(number, iteration=self.ctx.index)
        return sample_of(group, index, "", 1 + number + index, policy_versions=spans)

    async def run(self, order: Sequence[int], between: Callable[[int], bool] = lambda landed: True) -> Any:
        """The filter's record, with groups that land in this order; between: what must hold after so many before the next."""
        async with asyncio.TaskGroup() as tasks:
            judged = tasks.create_task(filter_groups.fn(self.ctx))
            if self.ctx.eager:
                tasks.create_task(eager_passes.fn(self.ctx))
            for landed, number in enumerate(order, 1):
                await self.land(number)
                async with asyncio.timeout(180):
                    while not between(landed):  # noqa: ASYNC110 - what the ranks hold is no event
                        await asyncio.sleep(0.01)
        return await judged

    def hashes(self, chunks: Sequence[int]) -> list[str]:
        """Of the chunks of the committed batch."""
        rows = read_rows(self.ctx.folder.read_table("batch.parquet", "batch"))
        return [hash_of(part, 0) for part in cut_into(rows, chunks)]


def _score(sample: GeneratedSample, reward: float) -> ScoredSample:
    return ScoredSample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        reward=reward,
        reward_parts=[],
        scoring="scored",
        reason=None,
        scoring_s=0.0,
    )
