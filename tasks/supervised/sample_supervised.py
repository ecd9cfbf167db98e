"""sample_supervised: draw rows with reference answers, or whole dialogues, and make them the batch of a supervised iteration.

The response is the row's label as text; for a dialogue, everything from the first trained turn on. Reads the
committed history and the sources; writes prompts.parquet, verdicts.parquet and batch.parquet, and pictures of prompts to the
run's folder.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefect import task

from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.sample import BatchSample, DrawnGroup, JudgedSample
from millrace.core.contracts.task_records import FileRecord, SampleSupervisedRecord
from millrace.core.errors import DataError
from millrace.tasks.context import IterationContext
from millrace.tasks.data.rows import UsablePrompt
from millrace.tasks.sample_prompts import add_curriculum, draw_groups


@dataclass(frozen=True)
class Response:
    """The tokens after a row's prompt. `mask` is 1 for tokens with a loss."""

    tokens: list[int]
    mask: list[int]
    text: str
    turns: int


def response_of(read: UsablePrompt, source: str, tokenizer: PromptTokenizer, chat: bool) -> Response:
    """The response of a usable row of a source. chat: whether the chat template writes its prompts. Raises DataError if it has
    none.
    """
    if read.dialogue is not None:
        dialogue = read.dialogue
        return Response(dialogue.tokens, dialogue.mask, dialogue.text, dialogue.turns)
    answer = read.row.label
    if not isinstance(answer, str) or not answer:
        raise DataError(
            "the label is not text; supervised training needs an answer in every row",
            where=f"source {source}, row {read.row.row}",
            remedy="set the source's label_key to the column that holds it, or loss_on=assistant for whole dialogues",
        )
    tokens = tokenizer.encode_response(answer, chat)
    return Response(tokens, [1] * len(tokens), answer, 1)


@task(name="sample_supervised")
async def sample_supervised(ctx: IterationContext) -> SampleSupervisedRecord:
    """Draw the iteration's rows and write its batch; the record counts rows and tokens."""
    return await asyncio.to_thread(_draw, ctx)


def _draw(ctx: IterationContext) -> SampleSupervisedRecord:
    groups, read, by_source = draw_groups(ctx, ctx.config.rollout.prompts, 0)
    # before the tables, which name them
    images = ctx.runtime.prompts.keep_images(read)
    files = [_write(ctx, "prompts", groups)]
    drawn = zip(groups, read, strict=True)
    usable = [(group, item) for group, item in drawn if isinstance(item, UsablePrompt)]
    samples = [_sample(ctx, group, item, position) for position, (group, item) in enumerate(usable)]
    verdicts = [_verdict(sample) for sample in samples]
    verdicts += [_dropped(group) for group in groups if group.unusable is not None]
    files.append(_write(ctx, "verdicts", verdicts))
    files.append(_write(ctx, "batch", samples))
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    record: SampleSupervisedRecord = {
        "files": files,
        "rows": len(samples),
        "tokens": tokens,
        "by_source": by_source,
    }
    if images:
        record["images"] = [entry.record() for entry in images]
    add_curriculum(ctx, record)
    return record


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


def _dropped(group: DrawnGroup) -> JudgedSample:
    return JudgedSample(
        sample_id=sample_id(group.group_id, 0),
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        verdict="dropped",
        reason=f"unusable row: {group.unusable}",
        train_step=None,
    )


def _sample(ctx: IterationContext, group: DrawnGroup, read: UsablePrompt, position: int) -> BatchSample:
    """A batch row whose response is trained. `position`: of the group in drawing order."""
    chat = next(source.chat for source in ctx.config.data.sources if source.name == group.source)
    response = response_of(read, group.source, ctx.runtime.prompts.tokenizer, chat)
    return BatchSample(
        **group.of_sample(0),
        sample_id=sample_id(group.group_id, 0),
        tokens=[*group.prompt_tokens, *response.tokens],
        response_length=len(response.tokens),
        response=response.text,
        loss_mask=response.mask,
        rollout_logprobs=[0.0] * len(response.tokens),
        policy_versions=[],
        engine_id="",
        seed=0,
        turns=response.turns,
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
