"""The rule of records: a task whose record is committed never runs again.

A record lies in the run's own folder, at `<run>/iterations/NNNNNN/results/<task>.json`; millrace.core.contracts.task_records
says what each holds. Which failures are worth a retry is decided here as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from prefect import Task

from millrace.connectors.prefect.record_storage import kept_at
from millrace.core.errors import LASTING, CorruptFileError, MissingFileError, StorageError
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point

log = logging.getLogger(__name__)

Record = TypeVar("Record")


def may_help(_task: Any, _task_run: Any, state: Any) -> bool:
    """Whether a retry can help. Of several failures, one that lasts decides."""
    return not _lasts(state.data)


def _lasts(error: object) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_lasts(each) for each in error.exceptions)
    return isinstance(error, LASTING)


async def run_recorded(
    task: Task[[IterationContext], Coroutine[Any, Any, Record]], ctx: IterationContext
) -> Record:
    """Run a task unless its record is committed. Puts record and wall time into the context and returns the record.

    Raises StorageError if the record cannot be read or written. Prefect alone would run the task again, or go on.
    """
    started = time.perf_counter()
    await kill_point(ctx.index, task.name, "before")
    if ctx.folder.fence:  # trainer and engines are another driver's where the lease is
        await asyncio.to_thread(ctx.folder.fence.check)
    path = f"results/{task.name}.json"
    await asyncio.to_thread(_remove_if_broken, ctx, path)
    key = f"{ctx.config.run.name}/{ctx.run_folder.iteration_path(ctx.index)}/{path}"
    record = await kept_at(key, task, ctx.runtime.record_storage)(ctx)
    if not await asyncio.to_thread(ctx.folder.exists, path):  # Prefect only logs that it could not write it
        await asyncio.to_thread(ctx.run_folder.store.check_writable)
        raise StorageError(
            f"cannot write: the record of {task.name} is missing after it was written",
            where=ctx.folder.url_of(path),
            remedy="free space or fix the storage and start again; nothing committed is lost",
        )
    cast(dict[str, Record], ctx.records)[task.name] = record
    await kill_point(ctx.index, task.name, "after")
    ctx.seconds[task.name] = time.perf_counter() - started
    return record


def _remove_if_broken(ctx: IterationContext, path: str) -> None:
    """Remove a record that is no JSON, so that the task runs again."""
    try:
        ctx.folder.read_json(path)
    except MissingFileError:
        pass
    except CorruptFileError as error:
        log.warning("removing a broken record: %s", error)
        ctx.folder.remove(path)
