"""train_step: apply this iteration's optimizer steps to the live trainer.

Reads batch.parquet (by url, in the ranks, which check its hash); writes step.json; with trainer.store_logprobs the
ranks write logprobs/. With pipeline.eager the ranks make the passes
chunk by chunk, and may hold gradients of the first chunks already; the chunks' files are removed. The record never stands for
live weights: `Trainer.at` rebuilds a lost trainer from checkpoint and replay, and a rank answers from memory if it holds the
step already.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from prefect import task

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import EAGER, LOGPROBS
from millrace.connectors.trainers.rank import Rank
from millrace.core.contracts.task_records import (
    FileRecord,
    StepFile,
    StepMetrics,
    StepRequest,
    TrainStepRecord,
)
from millrace.core.errors import MillraceError
from millrace.core.logprob_gap import LogprobGuard
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help

FLOOR = "logprob_gap_floor"


@task(name="train_step", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def train_step(ctx: IterationContext) -> TrainStepRecord:
    """Train the steps of the iteration in order; the record holds each step's metrics."""
    started = time.perf_counter()
    steps: list[StepMetrics] = []
    batch_url, batch, chunks = ctx.folder.url_of("batch.parquet"), _batch(ctx), _chunks(ctx)
    if ctx.config.pipeline.rollouts_only:
        return await asyncio.to_thread(_untrained, ctx, batch)
    async with ctx.runtime.memory.for_trainer() as trainer:
        sleep_s = time.perf_counter() - started
        for version in range(ctx.version_before + 1, ctx.version_after + 1):
            asked = time.perf_counter()
            # a rank one step ahead answers from memory
            ranks = await trainer.at(version - 1, ahead=1)
            ctx.times.trainer_s += time.perf_counter() - asked
            first = version == ctx.version_before + 1
            # the first step compares every sample of the iteration, under the weights that sampled it
            compares, stores = first and ctx.config.generates, first and ctx.config.trainer.store_logprobs
            guard = await asyncio.to_thread(_guard, ctx) if compares else None
            ctx.runtime.recovery.ready()
            asked_for = StepRequest(
                version,
                batch_url,
                guard,
                batch_sha256=batch["sha256"],
                chunks=chunks,
                stores=stores,
                trace=ctx.trace,
            )
            steps.append(await ranks.together(Rank.train, asked_for))
            await kill_point(ctx.index, "train_step", "in")
    _keep_floor(ctx, steps)
    if chunks:
        await asyncio.to_thread(ctx.folder.remove, EAGER, recursive=True)
    logprobs = [file for step in steps for file in step.get("logprobs", ())]
    if ctx.config.trainer.store_logprobs:
        await asyncio.to_thread(_remove_others, ctx, logprobs)
    made: StepFile = {
        "version": ctx.version_after,
        "steps": steps,
        "rest_s": sleep_s,
        "seconds": time.perf_counter() - started,
    }
    if ctx.times.handed_s is not None:
        made["handed_s"] = ctx.times.handed_s
    entry = await asyncio.to_thread(ctx.folder.write_json, "step.json", made)
    return {**made, "files": [entry.record(), *logprobs], "batch": batch}


def _remove_others(ctx: IterationContext, named: Sequence[FileRecord]) -> None:
    """Remove files of the trainer's log-probabilities that an interrupted attempt left."""
    for path in set(ctx.folder.list(LOGPROBS)) - {file["path"] for file in named}:
        ctx.folder.remove(path)


def _untrained(ctx: IterationContext, batch: FileRecord) -> TrainStepRecord:
    """The record of a batch that is not trained: only the samples of each step."""
    named = Counter(
        ctx.folder.read_table("batch.parquet", "batch", columns=["train_step"])["train_step"].to_pylist()
    )
    versions = range(ctx.version_before + 1, ctx.version_after + 1)
    per_pass = len(versions) // ctx.config.trainer.passes
    steps = [
        {"version": version, "samples": named[versions[number % per_pass]]}
        for number, version in enumerate(versions)
    ]
    made = cast(StepFile, {"version": ctx.version_after, "steps": steps, "rest_s": 0.0, "seconds": 0.0})
    return {**made, "files": [ctx.folder.write_json("step.json", made).record()], "batch": batch}


async def hand_over(ctx: IterationContext, evaluated: asyncio.Task[None]) -> None:
    """When generation is over, hand shared GPUs to the trainer, while the batch is completed.

    `train_step` repeats it if it fails. evaluated: an evaluation that engines must have made before.
    """
    if not ctx.config.placement.colocate:
        return
    await asyncio.wait([evaluated])
    started = time.perf_counter()
    with contextlib.suppress(MillraceError):
        if await ctx.runtime.memory.hand_to_trainer():
            ctx.times.handed_s = time.perf_counter() - started


def _guard(ctx: IterationContext) -> LogprobGuard:
    """The limit on the difference of engine and trainer: the configured one, or from the previous iteration's rounding floor."""
    limit = ctx.config.sync.max_logprob_gap
    if limit != "auto":
        return LogprobGuard(limit)
    if ctx.runtime.rounding_floor is None and ctx.index:  # the first iteration of this start
        before = IterationFiles(ctx.run_folder, ctx.index - 1).record("train_step")
        _keep_floor(ctx, before["steps"] if before else [])
    return LogprobGuard(floor=ctx.runtime.rounding_floor)


def _keep_floor(ctx: IterationContext, steps: Sequence[Mapping[str, Any]]) -> None:
    """Keep the rounding floor for later iterations."""
    found = [step[FLOOR] for step in steps if FLOOR in step]
    ctx.runtime.rounding_floor = found[0] if found else ctx.runtime.rounding_floor


def _chunks(ctx: IterationContext) -> list[int] | None:
    """Rows of each chunk of the committed batch; None if it has no chunks."""
    return None if ctx.config.algorithm.supervised else ctx.records["filter"].get("chunks")


def _batch(ctx: IterationContext) -> FileRecord:
    """The batch's file, from the record of the task that wrote it."""
    supervised = ctx.config.algorithm.supervised
    files = (ctx.records["sample_supervised"] if supervised else ctx.records["filter"])["files"]
    return next(file for file in files if file["path"] == "batch.parquet")
