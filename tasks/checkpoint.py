"""checkpoint: save trainer state when it is due, drop what retention no longer keeps, export Hugging Face files.

Writes checkpoints/NNNNNN/ (complete.json last) and exports/NNNNNN/. A checkpoint is named by the iterations it has seen.
"""

from __future__ import annotations

import asyncio
import time

from prefect import task

from millrace.connectors.storage.run_folder import COMPLETE
from millrace.core.contracts.task_records import CheckpointRecord, FileRecord
from millrace.core.retention import checkpoints_to_drop, due
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help


@task(name="checkpoint", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def checkpoint(ctx: IterationContext) -> CheckpointRecord:
    """Save and export what is due after this iteration."""
    config, done = ctx.config, ctx.index + 1
    last = done == config.run.iterations
    record: CheckpointRecord = {"saved": None, "exported": None, "dropped": [], "seconds": 0.0}
    started = time.perf_counter()
    if due(done, config.checkpoint.every) or last:
        path = ctx.run_folder.checkpoint_path(done)
        if done not in await asyncio.to_thread(ctx.run_folder.complete_checkpoints):
            async with (
                ctx.runtime.memory.for_trainer() as trainer
            ):  # all its state must be on the GPU to be saved
                ranks = await trainer.at(ctx.version_after)
                await ranks.save(ctx.run_folder.store.url_of(path))
            await kill_point(ctx.index, "checkpoint", "in")
        record["saved"] = path
        marker = await asyncio.to_thread(ctx.run_folder.store.entry, f"{path}/{COMPLETE}")
        record["marker"] = marker.record()
        record["dropped"] = await asyncio.to_thread(_retain, ctx)
    if (config.checkpoint.export_every and due(done, config.checkpoint.export_every)) or (
        last and config.checkpoint.export_last
    ):
        record["exported"], record["export_files"] = await _export(ctx, done)
    record["seconds"] = time.perf_counter() - started
    return record


def _retain(ctx: IterationContext) -> list[str]:
    rule = ctx.config.checkpoint
    complete = ctx.run_folder.complete_checkpoints()
    scores: dict[int, float] = {}
    for done in complete if rule.keep_best else ():
        manifest = ctx.run_folder.manifest(done - 1)  # None: the open iteration's
        value = manifest.tasks["metrics"].get(rule.keep_best) if manifest else None
        if value is not None:
            scores[done] = value
    dropped = checkpoints_to_drop(complete, rule.keep_last, rule.keep_every, scores)
    for number in dropped:
        ctx.run_folder.remove_checkpoint(number)
    return [ctx.run_folder.checkpoint_path(number) for number in dropped]


async def _export(ctx: IterationContext, done: int) -> tuple[str, list[FileRecord]]:
    path = f"exports/{done:06d}"
    async with ctx.runtime.memory.for_weights(ctx.version_after) as ranks:
        files = await ranks.upload(ctx.run_folder.store.url_of(path), ctx.version_after)
    return path, files
