"""sample_supervised: draw rows with reference answers and make them the batch of a supervised iteration.

The prompt's answer is the row's label, as text. Reads the committed history and the sources; writes prompts.parquet,
verdicts.parquet and batch.parquet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prefect import task

from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.sample import BatchSample, DrawnGroup, JudgedSample
from millrace.core.contracts.task_records import FileRecord, SampleSupervisedRecord
from millrace.core.errors import DataError
from millrace.tasks.context import IterationContext
from millrace.tasks.sample_prompts import draw_groups


@task(name="sample_supervised")
async def sample_supervised(ctx: IterationContext) -> SampleSupervisedRecord:
    """Draw the iteration's rows and write its batch; the record counts rows and tokens."""
    return await asyncio.to_thread(_draw, ctx)


def _draw(ctx: IterationContext) -> SampleSupervisedRecord:
    groups, by_source = draw_groups(ctx, reserve=0)
    files = [_write(ctx, "prompts", groups)]
    samples = [_sample(ctx, group, position) for position, group in enumerate(groups)]
    files.append(_write(ctx, "verdicts", [_verdict(sample) for sample in samples]))
    files.append(_write(ctx, "batch", samples))
    tokens = sum(sample.response_length for sample in samples)
    return {"files": files, "rows": len(samples), "tokens": tokens, "by_source": by_source}


def _write(ctx: IterationContext, kind: str, rows: Sequence[Any]) -> FileRecord:
    return ctx.folder.write_table(f"{kind}.parquet", schema.to_table(rows, kind), kind).record()


def _verdict(sample: BatchSample) -> JudgedSample:
    return JudgedSample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt_id=sample.prompt_id,
        verdict=sample.verdict,
        reason=sample.reason,
        train_step=sample.train_step,
    )


def _sample(ctx: IterationContext, group: DrawnGroup, position: int) -> BatchSample:
    """A batch row whose response is the reference answer. `position`: of the group in drawing order."""
    answer = ctx.runtime.prompts.dataset.row(group.source, group.row).label
    if not isinstance(answer, str) or not answer:
        raise DataError(
            "the label is no text; supervised training needs an answer in every row",
            where=f"source {group.source}, row {group.row}",
            remedy="set data.sources[].label_key to the column that holds it",
        )
    response = ctx.runtime.prompts.tokenizer.encode_response(answer)
    return BatchSample(
        sample_id=sample_id(group.group_id, 0),
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        iteration=group.iteration,
        source=group.source,
        index=0,
        prompt=group.prompt,
        label=group.label,
        metadata=group.metadata,
        tokens=[*group.prompt_tokens, *response],
        response_length=len(response),
        response=answer,
        loss_mask=[1] * len(response),
        rollout_logprobs=[0.0] * len(response),
        policy_versions=[],
        engine_id="",
        seed=0,
        turns=1,
        status="completed",
        reason=None,
        timings=[],
        reward=None,
        reward_parts=[],
        scoring="skipped",
        verdict="kept",
        shaped_reward=None,
        advantage=None,
        train_step=ctx.version_before + 1 + position // ctx.config.global_batch,
    )
