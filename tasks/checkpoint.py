"""checkpoint: save trainer state when it is due, drop what retention no longer keeps, export Hugging Face files.

Writes checkpoints/NNNNNN/ (complete.json last) and exports/NNNNNN/. A checkpoint is named by the iterations it has seen.
A background checkpoint starts in one iteration and counts from the first iteration that finds it written.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import cast

from prefect import task

from millrace.connectors.storage.checkpoint_files import unfinished_checkpoints
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import COMPLETE, RunFolder
from millrace.connectors.trainers.rank import Rank
from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import CheckpointRecord, EvaluateRecord, FileRecord, HeldOutRecord
from millrace.core.evaluation import LOWEST_IS_BEST, evaluation_metrics, held_out_metrics
from millrace.core.families.served_files import Served
from millrace.core.periodic import checkpoints_to_drop, exports_after, saves_after
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help

log = logging.getLogger(__name__)
POLL_S = 0.2
LOWEST = tuple(f"/{figure}" for figure in LOWEST_IS_BEST)


@task(name="checkpoint", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def checkpoint(ctx: IterationContext) -> CheckpointRecord:
    """Save and export what is due after this iteration."""
    config, done = ctx.config, ctx.index + 1
    last = done == config.run.iterations
    record: CheckpointRecord = {"saved": None, "exported": None, "dropped": [], "seconds": 0.0}
    started = time.perf_counter()
    is_due = saves_after(config, done)
    again = await _commit_written(ctx, record, wait=is_due)
    if is_due or again:
        background = config.saves_in_background and not last and not again
        await _save(ctx, record, done, background=background)
    if exports_after(config, done):
        record["exported"], record["export_files"] = await _export(ctx, done)
    record["seconds"] = time.perf_counter() - started
    return record


def begins_after(config: RunConfig, done: int) -> bool:
    """Whether a checkpoint or an export is due after this number of iterations. If not, a background one may have been written."""
    return saves_after(config, done) or exports_after(config, done)


async def _save(ctx: IterationContext, record: CheckpointRecord, done: int, *, background: bool) -> None:
    """Save this iteration's checkpoint, or start to. Call it only while no other checkpoint is written."""
    path = ctx.run_folder.checkpoint_path(done)
    if done not in await asyncio.to_thread(ctx.run_folder.complete_checkpoints):
        # a kill or a fault may have left some, and this checkpoint may need their space
        left = await asyncio.to_thread(unfinished_checkpoints, ctx.run_folder, before=done)
        record["dropped"] += await asyncio.to_thread(_drop, ctx, left)
        async with (
            ctx.runtime.memory.for_trainer() as trainer
            # all of the trainer's state must be on the GPU to be saved
        ):
            ranks = await trainer.at(ctx.version_after)
            url = ctx.run_folder.store.url_of(path)
            await ranks.each(Rank.begin_save if background else Rank.save, url)
        await kill_point(ctx.index, "checkpoint", "in")
        if background:
            record["begun"] = path
            return
    record["saved"], record["marker"] = path, await _marker(ctx, path)
    record["dropped"] += await asyncio.to_thread(_retain, ctx)


async def _commit_written(ctx: IterationContext, record: CheckpointRecord, *, wait: bool) -> bool:
    """Commit a checkpoint that an earlier iteration started, if it is written; returns whether it failed.

    wait: until it is written, since the next checkpoint is due.
    """
    started = time.perf_counter()
    trainer = ctx.runtime.memory.trainer
    saving = await trainer.saving()
    if saving is not None and wait and saving["state"] == "writing":
        log.warning("the checkpoint of %s is still being written, and another is due: waiting", saving["url"])
        while saving is not None and saving["state"] == "writing":
            await asyncio.sleep(POLL_S)
            saving = await trainer.saving()
        record["waited_s"] = time.perf_counter() - started
    if saving is None or saving["state"] == "writing":
        return False
    if saving["state"] == "failed":
        await trainer.saving_ranks().each(Rank.drop_save)
        log.error(
            "%s was not written, and this iteration is saved in its place: %s",
            saving["url"],
            saving["reason"],
        )
        return True
    record["write_s"] = max(await trainer.saving_ranks().each(Rank.commit_save))
    await kill_point(ctx.index, "checkpoint", "committed")
    record["committed"] = ctx.run_folder.checkpoint_path(int(saving["url"].rpartition("/")[2]))
    record["committed_marker"] = await _marker(ctx, record["committed"])
    record["dropped"] += await asyncio.to_thread(_retain, ctx)
    return False


async def _marker(ctx: IterationContext, path: str) -> FileRecord:
    """The entry of complete.json of a checkpoint."""
    entry = await asyncio.to_thread(ctx.run_folder.store.entry, f"{path}/{COMPLETE}")
    return entry.record()


def _retain(ctx: IterationContext) -> list[str]:
    rule = ctx.config.checkpoint
    complete = ctx.run_folder.complete_checkpoints()
    scores: dict[int, float] = {}
    for done in complete if rule.keep_best else ():
        assert rule.keep_best is not None
        value = _evaluated(ctx.run_folder, done).get(rule.keep_best)
        if value is not None:
            scores[done] = -value if rule.keep_best.endswith(LOWEST) else value
    return _drop(ctx, checkpoints_to_drop(complete, rule.keep_last, rule.keep_every, scores))


def _drop(ctx: IterationContext, numbers: list[int]) -> list[str]:
    for number in numbers:
        ctx.run_folder.remove_checkpoint(number)
    return [ctx.run_folder.checkpoint_path(number) for number in numbers]


def _evaluated(folder: RunFolder, done: int) -> Mapping[str, float]:
    """Metrics of the weights after `done` iterations, from the iteration that made them or started with them.

    Read from records, since an iteration may save before the manifests of earlier ones are written.
    """
    made, began = IterationFiles(folder, done - 1), IterationFiles(folder, done)
    for files, name in ((made, "evaluate"), (began, "evaluate_before")):
        if record := files.record(name):
            return evaluation_metrics(cast(EvaluateRecord, record))
    held_out = made.record("held_out_loss")
    return held_out_metrics(cast(HeldOutRecord, held_out)) if held_out else {}


async def _export(ctx: IterationContext, done: int) -> tuple[str, list[FileRecord]]:
    path = f"exports/{done:06d}"
    model, prompts = ctx.config.model, ctx.runtime.prompts.tokenizer
    template = prompts.tokenizer.chat_template if model.chat_template else None
    served = Served(prompts.ends.added, model.tokenizer, template)
    async with ctx.runtime.memory.for_weights(ctx.version_after) as ranks:
        url = ctx.run_folder.store.url_of(path)
        of_ranks = await ranks.each(Rank.upload, url, ctx.version_after, served)
    return path, [file for files in of_ranks for file in files]
