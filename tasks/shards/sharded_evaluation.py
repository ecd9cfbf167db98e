"""An evaluation in shards.

Knows nothing of how shards are started, nor of how they work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from millrace.connectors.storage.files import recorded
from millrace.connectors.storage.parts import read_parts
from millrace.core.contracts.sample import EvaluatedSample
from millrace.core.pipeline.sharding import in_shards
from millrace.core.staleness import VersionRange
from millrace.tasks.context import Evaluation, IterationContext
from millrace.tasks.samples.held_out import KIND, Made, evaluation_budget, made_of, places, write_prompts
from millrace.tasks.shards.attempts import Attempts, RunShard, on_ray
from millrace.tasks.shards.shard import evaluate_shard
from millrace.tasks.shards.sharded import can_begin
from millrace.tasks.stream import Stream


@contextlib.asynccontextmanager
async def open_evaluation(ctx: IterationContext) -> AsyncIterator[None]:
    """Within, an evaluation is made in shards, where the configuration says so."""
    if not in_shards(ctx.config) or not await can_begin(ctx):
        yield
        return
    ctx.evaluation_shards = ShardedEvaluation(ctx, on_ray())
    try:
        yield
    finally:
        ctx.evaluation_shards = None


class ShardedEvaluation:
    """The shards of one evaluation."""

    def __init__(self, ctx: IterationContext, run: RunShard) -> None:
        self._ctx, self._run = ctx, run

    async def make(self, evaluation: Evaluation, made: Mapping[tuple[str, int], EvaluatedSample]) -> Made:
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
            talk = await shards.conversation()
            for each, prompts in sets:
                talk.count_failures(each.name, evaluation_budget(ctx, evaluation, each, len(prompts)))
            await shards.count_stored(talk, KIND)
            talk.make_engines_ready()
            await shards.run(talk, evaluate_shard, "evaluate", [KIND])
        finally:
            await shards.close()
        return made_of(await asyncio.to_thread(self._stored), evaluation.version, failed=True)

    def _stored(self) -> list[EvaluatedSample]:
        entries = recorded(self._ctx.parts[KIND], self._ctx.folder.url)
        table = read_parts(self._ctx.folder, KIND, KIND, entries=entries)
        return [EvaluatedSample(**row) for row in table.to_pylist()]
