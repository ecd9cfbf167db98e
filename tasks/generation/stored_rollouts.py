"""take_rollouts: copy another run's files of an iteration up to its filter (pipeline.rollouts_from).

Copies the prompts, samples, turns and rewards that the other run's manifest names, each checked, then the records of the tasks
that made them. Existing files are compared and kept: a start after a kill copies the missing ones.
"""

import asyncio
from typing import cast

from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.parts import list_notes, list_parts
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError
from millrace.tasks.context import PROMPTS, IterationContext
from millrace.tasks.run_recorded import may_help

TASKS = ("rollout", "reward", "sample_prompts")
FOLDERS = ("rollouts/", "turns/", "rewards/")


@task(
    name="take_rollouts",
    retries=2,
    retry_delay_seconds=1,
    retry_condition_fn=may_help,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def take_rollouts(ctx: IterationContext) -> None:
    """Bring the iteration to the start of its filter: files and records in its folder, the records in the context.

    Raises StorageError if the other run has no such iteration, or a file differs from its manifest.
    """
    if not await asyncio.to_thread(ctx.folder.exists, record_path("filter")):
        await asyncio.to_thread(_take, ctx)
    files = IterationFiles(ctx.run_folder, ctx.index)
    for name in TASKS:
        record = await asyncio.to_thread(files.record, name)
        if record is None:
            raise StorageError(
                f"no record of {name} is there to copy",
                where=ctx.folder.url,
                remedy="take another run's rollouts",
            )
        ctx.add_record(name, record)


def _take(ctx: IterationContext) -> None:
    source = RunFolder(ctx.config.storage.root, cast(str, ctx.config.pipeline.rollouts_from))
    manifest = source.manifest(ctx.index)
    if manifest is None:
        raise StorageError(
            f"has not stored iteration {iteration_number(ctx.index)}",
            where=source.store.url,
            remedy="train it further, or lower run.iterations",
        )
    of = source.iteration(ctx.index)
    records = {record_path(name) for name in TASKS}
    wanted = [e for e in manifest.files if e.path == PROMPTS or e.path.startswith(FOLDERS)]
    copied = in_threads(lambda entry: _copy(of, ctx, entry), wanted)
    counted = {path for folder in FOLDERS for path in list_parts(ctx.folder, folder.rstrip("/"))}
    if any(copied) or not counted.issuperset(entry.path for entry in wanted if entry.path != PROMPTS):
        # a start after a kill has listed the parts that it found; without the list, later parts count too
        for path in list_notes(ctx.folder):
            ctx.folder.remove(path)
    in_threads(lambda entry: _copy(of, ctx, entry), [e for e in manifest.files if e.path in records])


def _copy(source: Store, ctx: IterationContext, entry: FileEntry) -> bool:
    """Copy a file unless it exists with the named content; returns whether it was copied."""
    try:
        ctx.folder.verify(entry)
        return False
    except (MissingFileError, CorruptFileError):
        ctx.folder.write(entry.path, source.read_named(entry.path, entry))
        return True
