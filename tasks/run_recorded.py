"""The rule of records: a task whose record is committed never runs again (except for `take_back_failures` of reward).

A record lies in the run's own folder, at `<run>/iterations/NNNNNN/results/<task>.json`; millrace.core.contracts.task_records
says what each holds. Also decides which failures are worth a retry.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from prefect import Task

from millrace.connectors.host.local_files import library_log
from millrace.connectors.prefect.record_storage import kept_at
from millrace.connectors.storage.files import recorded
from millrace.connectors.storage.iteration_files import IterationFiles, record_path, way_out
from millrace.core.errors import (
    LASTING,
    ActorLostError,
    CorruptFileError,
    RefusedStepError,
    StalledError,
    StorageError,
    first_error,
)
from millrace.core.waits import beat
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point

log = logging.getLogger(__name__)

Record = TypeVar("Record")


STALLS = 2  # tries of a task that may stall: ended parts are rebuilt once


def may_help(_task: Any, task_run: Any, state: Any) -> bool:
    """Whether a retry can help. A lasting failure among several rules it out, and so does a repeated stall."""
    again = not isinstance(first_error(state.data), StalledError) or task_run.run_count < STALLS
    return bool(again and not _lasts(state.data))


def _lasts(error: object) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_lasts(each) for each in error.exceptions)
    return isinstance(error, LASTING)


async def run_recorded(
    task: Task[[IterationContext], Coroutine[Any, Any, Record]], ctx: IterationContext
) -> Record:
    """Run a task unless its record is committed. Puts record and wall time into the context and returns the record.

    Raises StorageError if the record cannot be read or written. Prefect alone would run the task again, or continue.
    """
    started = time.perf_counter()
    beat()
    await kill_point(ctx.index, task.name, "before")
    # behind another driver's lease, trainer and engines are that driver's
    if ctx.folder.fence:
        await asyncio.to_thread(ctx.folder.fence.check)
    path = record_path(task.name)
    await asyncio.to_thread(_check_found, ctx, task.name)
    key = f"{ctx.config.run.name}/{ctx.run_folder.iteration_path(ctx.index)}/{path}"
    try:
        record = await kept_at(key, task, ctx.runtime.record_storage)(ctx)
    except RefusedStepError as error:
        error.remedy = f"{error.remedy or 'correct the cause'}, or {way_out(ctx.run_folder, ctx.index)}"
        raise
    except ActorLostError as error:
        error.remedy = error.remedy or after_tries(task.retries + 1)
        raise
    # Prefect only logs that it could not write it
    if not await asyncio.to_thread(ctx.folder.exists, path):
        await asyncio.to_thread(ctx.run_folder.store.check_writable)
        raise StorageError(
            f"cannot write: the record of {task.name} is missing after it was written",
            where=ctx.folder.url_of(path),
            remedy="free space or fix the storage and start again; nothing committed is lost",
        )
    ctx.add_record(task.name, record)
    beat()
    await kill_point(ctx.index, task.name, "after")
    ctx.times.intervals[task.name] = started, time.perf_counter()
    return record


def after_tries(tries: int) -> str:
    """What to do when a live part died in each try of a task."""
    return f"its task was tried {tries} times. Ray's output is in {library_log()}, for other hosts in Ray's log there: correct the cause, and start the same command again. Finished work is kept"


def _check_found(ctx: IterationContext, task: str) -> None:
    """Remove a corrupt record, so that the task runs again; check the files that a whole record names.

    Raises MissingFileError or CorruptFileError for a file that is missing or changed since the record was committed.
    """
    files = IterationFiles(ctx.run_folder, ctx.index)
    try:
        record = files.record(task)
    except CorruptFileError as error:
        log.warning("removing a broken record, its task runs again: %s", error)
        ctx.folder.remove(record_path(task))
        return
    if record:
        named = [*record.get("files", ()), *([record["batch"]] if "batch" in record else [])]
        files.check(recorded(named, files.folder.url))
