"""evaluate: sample the held-out sets with the weights of one version and score them.

Engines serve a version from its sync to the next one. `evaluate` ends before the next iteration continues; `evaluate_before`
evaluates the version that an iteration starts with, and may run beside its work until that iteration's sync.

Reads the held-out sets; writes eval/<set>/NNNNNN.parquet, named by the iterations trained so far. Scored samples are parts of
the iteration's folder until then: stored samples are not generated again. Same engines and same failure budget as training,
and the same reward unless the set has its own. An answer whose scoring failed or timed out counts as wrong, and is counted:
else a policy would gain by answers that no grader can read.
"""

import asyncio
import logging
import time

from prefect import task

from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.parts import read_parts
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts import schema
from millrace.core.contracts.failures import Failures
from millrace.core.contracts.sample import EvaluatedSample
from millrace.core.contracts.task_records import EvaluatedSet, EvaluateRecord, FileRecord
from millrace.core.contracts.topics import EvaluationTopic
from millrace.core.evaluation import EvaluatedAnswer, by_subset, figures
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.held_out import (
    KIND,
    evaluation_budget,
    made_of,
    make_set,
    places,
    remove_prompts,
)
from millrace.tasks.run_recorded import may_help

log = logging.getLogger(__name__)
UNSCORED = ("failed", "timed_out")


@task(name="evaluate", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def evaluate(ctx: IterationContext) -> EvaluateRecord:
    """Evaluate every set after this iteration; the record holds mean reward by set."""
    return await evaluate_version(ctx, done=ctx.index + 1, version=ctx.version_after, task="evaluate")


@task(name="evaluate_before", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def evaluate_before(ctx: IterationContext) -> EvaluateRecord:
    """Evaluate every set at the weights that this iteration starts with."""
    return await evaluate_version(ctx, done=ctx.index, version=ctx.version_before, task="evaluate_before")


def is_evaluated_by(ctx: IterationContext) -> bool:
    """Whether the previous iteration has evaluated the weights that this one starts with, in the foreground."""
    return ctx.index > 0 and IterationFiles(ctx.run_folder, ctx.index).before.record("evaluate") is not None


async def evaluate_version(
    ctx: IterationContext, done: int, version: int, task: str = "evaluate"
) -> EvaluateRecord:
    """Evaluate all sets at a weight version and write one table per set. `done`: iterations trained. task: owns the parts."""
    started = time.perf_counter()
    evaluation = EvaluationTopic(ctx.index, done, version, task)
    made = made_of(await stored_samples(ctx, version), version)
    images = await asyncio.to_thread(lambda: ctx.runtime.prompts.held_out_images)
    if ctx.evaluation_shards:
        made = await ctx.evaluation_shards.make(evaluation, made)
    results: dict[str, EvaluatedSet] = {}
    for held_out in ctx.config.evaluation.sets:
        prompts = ctx.runtime.prompts.held_out(held_out).usable
        if not ctx.evaluation_shards:
            budget = evaluation_budget(ctx, evaluation, held_out, len(prompts))
            made = await make_set(ctx, evaluation, held_out, prompts, budget, made)
        samples = [made[place] for place in places(held_out, prompts)]
        _warn_of_unscored(held_out, samples)
        results[held_out.name] = _figures(await write_set(ctx, held_out, done, samples), samples, held_out)
    await asyncio.to_thread(remove_prompts, ctx)
    record: EvaluateRecord = {
        "version": version,
        "done": done,
        "sets": results,
        "seconds": time.perf_counter() - started,
        "files": ctx.parts[KIND],
        "lag": await asyncio.to_thread(_lag, ctx, done),
    }
    if images:
        record["images"] = [entry.record() for entry in images]
    return record


def _lag(ctx: IterationContext, done: int) -> int:
    """Weight versions made since the version after `done` iterations."""
    index = done
    while ctx.run_folder.iteration(index).exists(record_path("train_step")):
        index += 1
    return (index - done) * ctx.config.steps_per_iteration


async def stored_samples(ctx: IterationContext, version: int) -> list[EvaluatedSample]:
    """Samples that an earlier attempt stored at this weight version; later parts are added to them."""
    stored = await asyncio.to_thread(read_parts, ctx.folder, KIND, KIND, ignore_incomplete=True)
    await asyncio.to_thread(ctx.start_parts, KIND)
    return [EvaluatedSample(**row) for row in stored.to_pylist() if row["version"] == version]


async def write_set(
    ctx: IterationContext, held_out: EvalSet, done: int, samples: list[EvaluatedSample]
) -> FileRecord:
    """The table of a set, by the iterations trained."""
    path, table = f"eval/{held_out.name}/{done:06d}.parquet", schema.to_table(samples, KIND)
    entry = await asyncio.to_thread(ctx.run_folder.store.write_table, path, table, KIND)
    return entry.record()


def _figures(file: FileRecord, samples: list[EvaluatedSample], held_out: EvalSet) -> EvaluatedSet:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    answers = [
        _answer(sample) for sample in samples if sample.reward is not None or sample.scoring in UNSCORED
    ]
    unscored, count = len(answers) - len(rewards), max(1, len(samples))
    whole = figures(answers, held_out.correct_from)
    return {
        "file": file,
        "reward_mean": whole.reward_mean,
        "interval": whole.interval,
        "majority": whole.majority,
        "pass_at": {str(k): value for k, value in whole.pass_at.items()},
        "subsets": {
            name: {
                "samples": part.answers,
                "reward_mean": part.reward_mean,
                "pass_at": {str(k): value for k, value in part.pass_at.items()},
            }
            for name, part in by_subset(answers, held_out.correct_from).items()
        },
        "samples": len(samples),
        "not_scored": len(samples) - len(rewards),
        "unscored": unscored,
        "response_length_mean": sum(sample.response_length for sample in samples) / count,
        "truncated_share": sum(sample.status == "truncated" for sample in samples) / count,
        "failed": sum(sample.status == "failed" for sample in samples),
    }


def _answer(sample: EvaluatedSample) -> EvaluatedAnswer:
    return EvaluatedAnswer(sample.prompt_id, sample.reward or 0.0, sample.answer, sample.subset)


def _warn_of_unscored(held_out: EvalSet, samples: list[EvaluatedSample]) -> None:
    unscored = Failures()
    for sample in samples:
        if sample.scoring in UNSCORED:
            unscored.add(
                sample.reason or sample.scoring, f"sample {sample.index} of prompt {sample.prompt_id}"
            )
    if unscored.total:
        log.warning(
            "evaluation of %s: %d of %d answers could not be scored and count as wrong; most often: %s",
            held_out.name,
            unscored.total,
            len(samples),
            unscored.most_frequent(),
        )
