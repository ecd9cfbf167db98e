"""sample_prompts: draw this iteration's prompt groups from the data sources, by the ledger.

Reads the committed history and the sources; writes prompts.parquet. Draws what the batch needs plus a reserve
that replaces dropped groups; the filter returns the unused reserve to the ledger.
"""

from __future__ import annotations

import asyncio
import json

from prefect import task

from millrace.core.contracts import schema
from millrace.core.contracts.ids import group_id
from millrace.core.contracts.sample import DrawnGroup
from millrace.core.contracts.task_records import SamplePromptsRecord
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point


def reserve_size(ctx: IterationContext) -> int:
    """Groups drawn beyond the batch, to stand in for dropped ones."""
    config = ctx.config
    return round(config.filter.refill_factor * config.rollout.prompts)


@task(name="sample_prompts")
async def sample_prompts(ctx: IterationContext) -> SamplePromptsRecord:
    """Draw groups and write prompts.parquet; the record counts them by source."""
    record = await asyncio.to_thread(_draw, ctx)
    await kill_point(ctx.index, "sample_prompts", "in")
    return record


def _draw(ctx: IterationContext) -> SamplePromptsRecord:
    groups, by_source = draw_groups(ctx, reserve_size(ctx))
    table = schema.to_table(groups, "prompts")
    entry = ctx.folder.write_table("prompts.parquet", table, "prompts")
    return {"files": [entry.record()], "groups": len(groups), "by_source": by_source}


def draw_groups(ctx: IterationContext, reserve: int) -> tuple[list[DrawnGroup], dict[str, int]]:
    """The groups that the ledger gives this iteration, and how many of those that the batch needs each source gave."""
    config, prompts = ctx.config, ctx.runtime.prompts.dataset
    draws = ctx.runtime.prompts.ledger().draw(ctx.index, config.rollout.prompts, reserve)
    rows: list[DrawnGroup] = []
    by_source: dict[str, int] = {}
    for draw in draws:
        row = prompts.row(draw.source, draw.row)
        rows.append(
            DrawnGroup(
                group_id=group_id(config.run.name, ctx.index, row.prompt_id, draw.ordinal),
                prompt_id=row.prompt_id,
                iteration=ctx.index,
                source=draw.source,
                row=draw.row,
                epoch=draw.epoch,
                ordinal=draw.ordinal,
                prompt=json.dumps(row.prompt, ensure_ascii=False),
                prompt_tokens=prompts.tokens(draw.source, draw.row),
                label=None if row.label is None else json.dumps(row.label, ensure_ascii=False),
                metadata=json.dumps(row.metadata, ensure_ascii=False) if row.metadata else None,
            )
        )
        if draw.ordinal < config.rollout.prompts:
            by_source[draw.source] = by_source.get(draw.source, 0) + 1
    return rows, by_source
