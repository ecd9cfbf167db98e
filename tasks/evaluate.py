"""evaluate: sample the held-out sets with the engines' current weights and score them.

Reads the held-out sets; writes eval/<set>/NNNNNN.parquet, named by the iterations trained so far. Same engines, same
reward and same failure budget as training. An answer whose scoring failed or timed out counts as wrong, and is counted:
else a policy would gain by answers that no grader can read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

from prefect import task

from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts import schema
from millrace.core.contracts.failures import Failures
from millrace.core.contracts.ids import derived_seed
from millrace.core.contracts.prompts import PromptRow
from millrace.core.contracts.sample import EvaluatedSample
from millrace.core.contracts.task_records import EvaluatedSet, EvaluateRecord, FileRecord
from millrace.core.errors import only_first_error
from millrace.tasks.context import IterationContext
from millrace.tasks.run_recorded import may_help
from millrace.tasks.samples.failures import FailureBudget
from millrace.tasks.samples.generation import SampleGenerator
from millrace.tasks.samples.scoring import score

log = logging.getLogger(__name__)


@task(name="evaluate", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def evaluate(ctx: IterationContext) -> EvaluateRecord:
    """Evaluate every set after this iteration; the record holds mean reward by set."""
    return await evaluate_version(ctx, done=ctx.index + 1, version=ctx.version_after)


@task(name="evaluate_before", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def evaluate_before(ctx: IterationContext) -> EvaluateRecord:
    """Evaluate every set before the first iteration."""
    return await evaluate_version(ctx, done=ctx.index, version=ctx.version_before)


async def evaluate_version(ctx: IterationContext, done: int, version: int) -> EvaluateRecord:
    """Evaluate all sets at a weight version and write one table per set. `done`: iterations trained."""
    started = time.perf_counter()
    results: dict[str, EvaluatedSet] = {}
    for held_out in ctx.config.evaluation.sets:
        samples = await _evaluate_set(ctx, held_out, done, version)
        path = f"eval/{held_out.name}/{done:06d}.parquet"
        table = schema.to_table(samples, "evaluations")
        entry = await asyncio.to_thread(ctx.run_folder.store.write_table, path, table, "evaluations")
        results[held_out.name] = _figures(entry.record(), samples)
    return {"version": version, "done": done, "sets": results, "seconds": time.perf_counter() - started}


def _figures(file: FileRecord, samples: list[EvaluatedSample]) -> EvaluatedSet:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    unscored = sum(sample.scoring in ("failed", "timed_out") for sample in samples)
    answered, count = len(rewards) + unscored, max(1, len(samples))
    return {
        "file": file,
        "reward_mean": sum(rewards) / answered if answered else None,
        "samples": len(samples),
        "not_scored": len(samples) - len(rewards),
        "unscored": unscored,
        "response_length_mean": sum(sample.response_length for sample in samples) / count,
        "truncated_share": sum(sample.status == "truncated" for sample in samples) / count,
        "failed": sum(sample.status == "failed" for sample in samples),
    }


async def _evaluate_set(
    ctx: IterationContext, held_out: EvalSet, done: int, version: int
) -> list[EvaluatedSample]:
    """The samples of a set, by prompt and index. Raises BudgetError naming the set if too many fail to generate.

    Why answers could not be scored is said in the log: their rows have no reason.
    """
    prompts = ctx.runtime.prompts.held_out(held_out)
    budget = FailureBudget(
        "rollout.max_failed_share",
        ctx.config.rollout.max_failed_share,
        len(prompts.rows) * held_out.samples_per_prompt,
        what="failed to generate",
        where=f"evaluation of {held_out.name} after {done} iterations",
        remedy="fix the cause or raise the share, and start the same command again: the evaluation is then repeated",
    )
    unscored = Failures()
    generator = SampleGenerator(
        ctx.config, held_out.sampling, lambda: ctx.runtime.memory.for_engines(version), budget
    )
    with only_first_error():
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(
                    _evaluate_one(ctx, held_out, generator, version, row, tokens, index, unscored)
                )
                for row, tokens in zip(prompts.rows, prompts.tokens, strict=True)
                for index in range(held_out.samples_per_prompt)
            ]
    if unscored.total:
        log.warning(
            "evaluation of %s: %d of %d answers could not be scored and count as wrong; most often: %s",
            held_out.name,
            unscored.total,
            len(running),
            unscored.most_frequent(),
        )
    return [each.result() for each in running]


async def _evaluate_one(
    ctx: IterationContext,
    held_out: EvalSet,
    generator: SampleGenerator,
    version: int,
    row: PromptRow,
    tokens: list[int],
    index: int,
    unscored: Failures,
) -> EvaluatedSample:
    seed = derived_seed(ctx.config.run.seed, "evaluate", held_out.name, row.prompt_id, index)
    request = f"eval-{version}-{row.prompt_id}-{index}"
    answer = await generator.generate(tokens, seed=seed, rid=request, session=None)
    prompt = json.dumps(row.prompt, ensure_ascii=False)
    label = None if row.label is None else json.dumps(row.label, ensure_ascii=False)
    length = len(answer.output_ids)
    result = await score(
        ctx.runtime,
        {
            "prompt": prompt,
            "label": label,
            "metadata": json.dumps(row.metadata, ensure_ascii=False) if row.metadata else None,
            "response": answer.text,
            "response_length": length,
            "status": answer.status,
        },
    )
    if result.scoring in ("failed", "timed_out"):
        unscored.add(result.reason or result.scoring, f"sample {index} of prompt {row.prompt_id}")
    return EvaluatedSample(
        set=held_out.name,
        prompt_id=row.prompt_id,
        index=index,
        prompt=prompt,
        label=label,
        response=answer.text,
        response_length=length,
        status=answer.status,
        reward=result.reward,
        scoring=result.scoring,
        version=version,
    )
