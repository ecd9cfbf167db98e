"""held_out_loss: the loss of the held-out sets under the trainer's current weights, without gradients.

Reads the held-out sets; writes eval/<set>/NNNNNN.parquet, named by the iterations trained so far. Losses are parts of the
iteration's folder until then: stored losses are not computed again. The trainer's ranks compute them, in their own layout.
"""

import asyncio
import math
import time
from collections.abc import Sequence

from prefect import task

from millrace.connectors.storage.parts import write_part
from millrace.connectors.trainers.rank import HeldOutSample, Rank
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts import schema
from millrace.core.contracts.sample import EvaluatedSample
from millrace.core.contracts.task_records import HeldOutRecord, HeldOutSet, HeldOutSubset
from millrace.core.errors import DataError
from millrace.core.plain_text import json_text
from millrace.tasks.context import IterationContext
from millrace.tasks.data.rows import UsablePrompt
from millrace.tasks.evaluate import stored_samples, write_set
from millrace.tasks.generation.held_out import KIND
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help
from millrace.tasks.supervised.sample_supervised import response_of

PART = 256  # rows that the ranks get at a time


@task(name="held_out_loss", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def held_out_loss(ctx: IterationContext) -> HeldOutRecord:
    """Loss of every set after this iteration; the record holds loss and perplexity by set."""
    return await _losses(ctx, done=ctx.index + 1, version=ctx.version_after)


@task(name="held_out_loss_before", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def held_out_loss_before(ctx: IterationContext) -> HeldOutRecord:
    """Loss of every set before the first iteration."""
    return await _losses(ctx, done=ctx.index, version=ctx.version_before)


async def _losses(ctx: IterationContext, done: int, version: int) -> HeldOutRecord:
    """Losses of all sets at a weight version, in one table a set. `done`: iterations trained."""
    started = time.perf_counter()
    known = await stored_samples(ctx, version)
    images = await asyncio.to_thread(lambda: ctx.runtime.prompts.held_out_images)
    sets: dict[str, HeldOutSet] = {}
    for held_out in ctx.config.evaluation.sets:
        prompts = await asyncio.to_thread(ctx.runtime.prompts.held_out, held_out)
        if not prompts.usable:
            raise DataError(
                "none of its rows can be used",
                where=f"evaluation.sets.{held_out.name}.path = {held_out.path}",
                remedy="`millrace check` shows why; correct the file or the keys of the set",
            )
        made = {sample.prompt_id: sample for sample in known if sample.set == held_out.name}
        due = [prompt for prompt in prompts.usable if prompt.row.prompt_id not in made]
        for start in range(0, len(due), PART):
            samples = await _computed(ctx, held_out, due[start : start + PART], version)
            made |= {sample.prompt_id: sample for sample in samples}
            table = schema.to_table(samples, KIND)
            entry = await asyncio.to_thread(write_part, ctx.folder, KIND, table, KIND)
            ctx.parts[KIND].append(entry.record())
            await kill_point(ctx.index, "held_out_loss", "in")
        rows = [made[prompt.row.prompt_id] for prompt in prompts.usable]
        file = await write_set(ctx, held_out, done, rows)
        subsets = {
            name: _figures([row for row in rows if row.subset == name])
            for name in sorted({row.subset for row in rows if row.subset is not None})
        }
        sets[held_out.name] = {"file": file, **_figures(rows), "subsets": subsets}
    seconds = time.perf_counter() - started
    files = ctx.parts[KIND]
    record: HeldOutRecord = {
        "version": version,
        "done": done,
        "sets": sets,
        "seconds": seconds,
        "files": files,
    }
    if images:
        record["images"] = [entry.record() for entry in images]
    return record


async def _computed(
    ctx: IterationContext, held_out: EvalSet, prompts: Sequence[UsablePrompt], version: int
) -> list[EvaluatedSample]:
    """These rows of a set, with their losses under `version`."""
    tokenizer = ctx.runtime.prompts.tokenizer
    responses = [response_of(prompt, held_out.name, tokenizer, held_out.chat) for prompt in prompts]
    samples = [
        HeldOutSample(
            [*prompt.tokens, *response.tokens], response.mask, tuple(each.name for each in prompt.pictures)
        )
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    async with ctx.runtime.memory.for_trainer() as trainer:
        ranks = await trainer.at(version)
        losses = await ranks.together(Rank.losses, version, samples)
    found: list[EvaluatedSample] = []
    for prompt, response, loss in zip(prompts, responses, losses, strict=True):
        row, count = prompt.row, sum(response.mask)
        subset = row.metadata.get(held_out.subset_key or "")
        found.append(
            EvaluatedSample(
                set=held_out.name,
                prompt_id=row.prompt_id,
                index=0,
                prompt=json_text(row.prompt),
                label=None if row.label is None else json_text(row.label),
                response=response.text,
                response_length=len(response.tokens),
                status="completed",
                reward=None,
                scoring="skipped",
                version=version,
                subset=None if subset is None else str(subset),
                reason=None,
                loss=loss / count,
                loss_tokens=count,
            )
        )
    return found


def _figures(rows: Sequence[EvaluatedSample]) -> HeldOutSubset:
    """The mean over all tokens of all rows."""
    tokens, total = 0, 0.0
    for row in rows:
        assert row.loss is not None, "it was computed"
        assert row.loss_tokens, "every row has a token with a loss"
        tokens += row.loss_tokens
        total += row.loss * row.loss_tokens
    loss = total / tokens
    return {"samples": len(rows), "tokens": tokens, "loss": loss, "perplexity": math.exp(loss)}
