"""sample_prompts: draw this iteration's prompt groups from the data sources, by the ledger.

Reads the committed history and the sources; writes prompts.parquet, and pictures of prompts to the run's folder. Draws what the batch needs plus a reserve
that replaces dropped groups; the filter returns the unused reserve to the ledger. With a buffer it also chooses the trained
groups that take a share of the places, and its record names them.
"""

import asyncio
from collections import Counter

from prefect import task

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.core.accounts.buffer import HeldGroups, chosen, reach
from millrace.core.accounts.curriculum import source_and_level
from millrace.core.accounts.ledger import Draw
from millrace.core.accounts.selection import drawn
from millrace.core.contracts import schema
from millrace.core.contracts.ids import group_id, prompt_id
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined
from millrace.core.contracts.sample import DrawnGroup
from millrace.core.contracts.task_records import CurriculumRecord, ReusedGroup, SamplePromptsRecord
from millrace.core.plain_text import json_text
from millrace.tasks.context import IterationContext
from millrace.tasks.data.rows import Read
from millrace.tasks.kill_points import kill_point


def reserve_size(ctx: IterationContext) -> int:
    """Groups drawn beyond the batch, to replace dropped ones."""
    config = ctx.config
    return round(config.filter.refill_factor * config.rollout.prompts)


@task(name="sample_prompts")
async def sample_prompts(ctx: IterationContext) -> SamplePromptsRecord:
    """Draw groups and write prompts.parquet; the record counts them by source."""
    record = await asyncio.to_thread(_draw, ctx)
    await kill_point(ctx.index, "sample_prompts", "in")
    return record


def _draw(ctx: IterationContext) -> SamplePromptsRecord:
    buffer = _buffer(ctx)
    reused = _reused(ctx, buffer) if buffer else []
    released = wanted(ctx, len(reused))
    groups, read, by_source = draw_groups(ctx, released, reserve_size(ctx))
    # before the table, which names them
    images = ctx.runtime.prompts.keep_images(read)
    table = schema.to_table(groups, "prompts")
    entry = ctx.folder.write_table("prompts.parquet", table, "prompts")
    record: SamplePromptsRecord = {
        "files": [entry.record()],
        "groups": len(groups),
        "by_source": by_source,
        "released": released,
    }
    if images:
        record["images"] = [entry.record() for entry in images]
    add_curriculum(ctx, record)
    if buffer is not None:
        record["reused"], record["buffered"] = reused, len(buffer.groups())
    return record


def add_curriculum(ctx: IterationContext, record: CurriculumRecord) -> None:
    """Put the levels and the stage that this iteration draws from into its record."""
    standing = ctx.runtime.prompts.ledger_before(ctx.index).standing(ctx.index)
    if standing.mastery:
        record["levels"] = {source: mastery.highest for source, mastery in standing.mastery.items()}
    if ctx.config.data.stages:
        record["stage"] = standing.stage


def _buffer(ctx: IterationContext) -> HeldGroups | None:
    """The buffer after the committed iterations; None without a buffer."""
    settings = ctx.config.rollout.buffer
    if settings is None:
        return None
    since = reach(ctx.index, settings.max_age)
    buffer = HeldGroups(settings.max_age, settings.max_uses, ctx.config.steps_per_iteration)
    return buffer.extend(ctx.run_folder.history(since))


def _reused(ctx: IterationContext, buffer: HeldGroups) -> list[ReusedGroup]:
    """The groups that this iteration trains again."""
    settings, prompts = ctx.config.rollout.buffer, ctx.config.rollout.prompts
    assert settings is not None
    return [
        {"iteration": group.iteration, "ordinal": group.ordinal, "age": group.age, "uses": group.uses + 1}
        for group in chosen(buffer.groups(), settings.wanted(prompts), settings)
    ]


def wanted(ctx: IterationContext, reused: int = 0) -> int:
    """How many groups generate from the start. reused: groups of the batch that are not drawn.

    With pipeline.select=finish these are more than the batch needs, less the deferred groups, which are in flight already.
    """
    pipeline, prompts = ctx.config.pipeline, ctx.config.rollout.prompts
    if pipeline.select == "draw":
        return prompts - reused
    known = ctx.runtime.prompts.newest_before(ctx.index)
    open_before = [_released(ctx, index) for index in range(known + 1, ctx.index)]
    return drawn(prompts, pipeline.reserve, len(ctx.runtime.prompts.deferred_by(known)), open_before)


def _released(ctx: IterationContext, index: int) -> int:
    """Groups that an open iteration released from its draw at the start."""
    record = IterationFiles(ctx.run_folder, index).record("sample_prompts")
    assert record is not None, "iterations draw in turn"
    released: int = record.get("released", ctx.fresh_groups)
    return released


def draw_groups(
    ctx: IterationContext, need: int, reserve: int
) -> tuple[list[DrawnGroup], list[Read], dict[str, int]]:
    """The groups that the ledger gives this iteration, their rows, and the count of the first `need` groups by source.

    For each unusable row, one more group is drawn.
    """
    ledger, dataset = ctx.runtime.prompts.ledger_before(ctx.index), ctx.runtime.prompts.dataset
    read: list[Read] = []
    spoilt = 0
    while True:
        draws = ledger.draw(ctx.index, need, reserve + spoilt)
        parts = [source_and_level(draw.source) for draw in draws]
        fresh = range(len(read), len(draws))
        read += dataset.read([(*parts[at], draws[at].row) for at in fresh])
        unusable = sum(isinstance(item, Quarantined) for item in read)
        if unusable == spoilt:
            break
        spoilt = unusable
    groups = [_group(ctx, draw, *part, item) for draw, part, item in zip(draws, parts, read, strict=True)]
    usable = [group.source for group in groups if group.unusable is None]
    return groups, read, dict(Counter(usable[:need]))


def _group(ctx: IterationContext, draw: Draw, source: str, level: int | None, item: Read) -> DrawnGroup:
    """A row of prompts.parquet. For an unusable row it has the start of its content as text."""
    if isinstance(item, Quarantined):
        row, tokens = PromptRow(source, item.row, prompt_id(source, item.row, item.excerpt), item.excerpt), []
    else:
        row, tokens = item.row, item.tokens
    return DrawnGroup(
        group_id=group_id(ctx.config.run.name, ctx.index, row.prompt_id, draw.ordinal),
        prompt_id=row.prompt_id,
        iteration=ctx.index,
        source=source,
        row=draw.row,
        epoch=draw.epoch,
        ordinal=draw.ordinal,
        prompt=json_text(row.prompt),
        prompt_tokens=tokens,
        label=None if row.label is None else json_text(row.label),
        metadata=json_text(row.metadata) if row.metadata else None,
        level=level,
        unusable=item.reason if isinstance(item, Quarantined) else None,
    )
