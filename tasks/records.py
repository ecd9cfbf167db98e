"""Where Prefect keeps each task's record: in the run's own folder, under `<run>/iterations/NNNNNN/results/`.

A committed record means the task never runs again; records name files and hold figures, never samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import Task
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.filesystems import RemoteFileSystem, WritableFileSystem
from prefect.serializers import JSONSerializer

from tasks.context import IterationContext

Record = dict[str, Any]


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
        ctx: IterationContext = inputs["ctx"]
        folder = ctx.run_folder.iteration_path(ctx.index)
        return f"{ctx.config.run.name}/{folder}/results/{task_ctx.task.name}.json"


async def record_storage(root: str) -> Path | WritableFileSystem:
    """Prefect's handle on the storage root; credentials of object stores come from the environment.

    Prefect takes an object store as a saved block: it holds the URL and nothing else.
    """
    if "://" not in root:
        return Path(root).resolve()
    if root.startswith("file://"):
        return Path(root.removeprefix("file://"))
    block = RemoteFileSystem(basepath=root)
    await block.save(f"millrace-{hashlib.sha256(root.encode()).hexdigest()[:12]}", overwrite=True)
    return block


async def run_recorded(task: Task[..., Any], ctx: IterationContext) -> Record:
    """Run a task unless its record is committed, and return the record either way."""
    configured = task.with_options(
        persist_result=True,
        cache_policy=RunFolderRecords(),
        result_serializer=JSONSerializer(),
        result_storage=ctx.live.record_storage,
    )
    call: Callable[..., Awaitable[Record]] = configured
    return await call(ctx=ctx)
