"""Where Prefect keeps each task's record: in the run's own folder, under `<run>/iterations/NNNNNN/results/`.

A committed record means the task never runs again; records name files and hold figures, never samples. They are written
through the Store, whole or not at all, and tried again as every other file is.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from prefect import Task
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.filesystems import WritableFileSystem
from prefect.serializers import JSONSerializer
from pydantic import Field
from tenacity import before_sleep_log, retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from millrace.connectors.storage.store import Store
from millrace.core.errors import LASTING, CorruptFileError, MissingFileError, StorageError
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point

log = logging.getLogger(__name__)

Record = dict[str, Any]


class RecordStorage(WritableFileSystem):
    """A storage root as Prefect sees it: nothing but its URL; credentials come from the environment."""

    _block_type_name = "millrace storage root"
    _block_type_slug = "millrace-storage-root"

    root: str = Field(description="Path or fsspec URL that holds the runs.")

    async def read_path(self, path: str) -> bytes:
        """A record's bytes."""
        return await asyncio.to_thread(Store(self.root).read, path)

    async def write_path(self, path: str, content: bytes) -> None:
        """Write a record, whole or not at all."""
        await asyncio.to_thread(Store(self.root).write, path, content)


@dataclass
class RunFolderRecords(CachePolicy):
    """Keys a task's record `<run>/iterations/NNNNNN/results/<task>.json` from the task's first argument."""

    def compute_key(
        self,
        task_ctx: TaskRunContext,
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],
        **kwargs: Any,
    ) -> str | None:
        """Where the record lies under the storage root."""
        ctx: IterationContext = inputs["ctx"]
        folder = ctx.run_folder.iteration_path(ctx.index)
        return f"{ctx.config.run.name}/{folder}/{_path(task_ctx.task.name)}"


@retry(
    retry=retry_if_exception_type(PrefectHTTPStatusError),
    stop=stop_after_attempt(5),
    wait=wait_fixed(1),
    before_sleep=before_sleep_log(log, logging.WARNING),
    reraise=True,
)
async def record_storage(root: str) -> RecordStorage:
    """Prefect's handle on the storage root, a saved block.

    A server that has just been started for the first time registers blocks of its own meanwhile, and may refuse.
    """
    block = RecordStorage(root=Store(root).url)
    await block.save(f"millrace-{hashlib.sha256(block.root.encode()).hexdigest()[:12]}", overwrite=True)
    return block


def may_help(_task: Any, _task_run: Any, state: Any) -> bool:
    """Whether trying a task again can help; where a rank's memory ran out, others may wait for it besides."""
    return not _lasts(state.data)


def _lasts(error: object) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_lasts(one) for one in error.exceptions)
    return isinstance(error, LASTING)


async def run_recorded(task: Task[..., Any], ctx: IterationContext) -> Record:
    """Run a task unless its record is committed, and return the record either way.

    Raises StorageError if the record cannot be read or written: Prefect by itself would run the task again, or go on.
    """
    await kill_point(ctx.index, task.name, "before")
    path = _path(task.name)
    try:
        await asyncio.to_thread(ctx.folder.read_json, path)
    except MissingFileError:
        pass
    except CorruptFileError as error:
        log.warning("removing a broken record: %s", error)
        await asyncio.to_thread(ctx.folder.remove, path)
    configured = task.with_options(
        persist_result=True,
        cache_policy=RunFolderRecords(),
        result_serializer=JSONSerializer(),
        result_storage=ctx.runtime.record_storage,
    )
    call: Callable[..., Awaitable[Record]] = configured
    record = await call(ctx=ctx)
    if not await asyncio.to_thread(ctx.folder.exists, path):  # Prefect only logs that it could not write it
        await asyncio.to_thread(ctx.run_folder.store.check_writable)
        raise StorageError(
            f"{ctx.folder.url_of(path)}: cannot write: the record of {task.name} is not there after it was written; "
            "free space or mend the storage and start again; nothing committed is lost"
        )
    await kill_point(ctx.index, task.name, "after")
    return record


def _path(task: str) -> str:
    return f"results/{task}.json"
