"""Where Prefect keeps the results of tasks: files under the storage root, at paths that the caller names.

They are written through the Store, whole or not at all, each with a hash of itself, and retried as every other file is. Knows nothing of what a
result means or of which tasks there are. Servers know the block type by its slug and by a hash of its fields and docstring:
both stay as they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.filesystems import WritableFileSystem
from prefect.serializers import JSONSerializer
from pydantic import Field, PrivateAttr
from tenacity import before_sleep_log, retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from millrace.connectors.storage.files import Fence
from millrace.connectors.storage.store import Store
from millrace.core.errors import CorruptFileError

log = logging.getLogger(__name__)

# A record names how it is read, and Prefect would import that: pickle, or any class. All of ours are plain JSON.
PLAIN = JSONSerializer(object_encoder=None, object_decoder=None)
P = ParamSpec("P")
R = TypeVar("R")


class RecordStorage(WritableFileSystem):
    """A storage root as Prefect sees it: nothing but its URL; credentials come from the environment."""  # hashed

    _block_type_name = "millrace storage root"
    _block_type_slug = "millrace-storage-root"

    root: str = Field(description="Path or fsspec URL that holds the runs.")
    _fence: Fence | None = PrivateAttr(None)  # no server knows of these
    _run_id: str | None = PrivateAttr(None)

    def drive_under(self, fence: Fence | None, run_id: str | None) -> None:
        """Records are written only while the fence lets this process change files, and name the run."""
        self._fence, self._run_id = fence, run_id

    async def read_path(self, path: str) -> bytes:
        """A record's bytes, with the result as plain JSON. Raises CorruptFileError if they are not those that were written."""
        store = Store(self.root)
        store.walls = f"{store.root}/{path.split('/', 1)[0]}"
        content = await asyncio.to_thread(store.read_sealed, path)
        result = content.get("result")
        if not isinstance(result, str):
            raise CorruptFileError(
                "it has no result", where=store.url_of(path), remedy="restore it from a copy"
            )
        return json.dumps({"metadata": {"serializer": PLAIN.model_dump()}, "result": result}).encode()

    async def write_path(self, path: str, content: bytes) -> None:
        """Write a record, whole or not at all; what is none is not kept. Its place is that in the run, whatever the run's name."""
        if "/" not in path:
            return  # what a failed task raised, under a name of Prefect's: the server has its message, and nothing reads it
        name, place = path.split("/", 1)
        run = Store(self.root).child(name)
        run.fence, run.walls = self._fence, run.root
        await asyncio.to_thread(run.write_sealed, place, json.loads(content), run=self._run_id)


@dataclass
class KeptAt(CachePolicy):
    """Keeps a task's result at one path under the storage root, whatever its inputs."""

    path: str = ""

    def compute_key(
        self,
        task_ctx: TaskRunContext,
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],
        **kwargs: Any,
    ) -> str | None:
        """The path: Prefect looks there before it runs the task, and writes there after it."""
        return self.path


def kept_at(path: str, task: Task[P, R], storage: RecordStorage) -> Task[P, R]:
    """The task with its result kept as JSON at a path under the storage root. It does not run if the file is there.

    Kept there alone: Prefect would also hold the newest thousand results in memory, which nothing reads.
    """
    return task.with_options(
        persist_result=True,
        cache_result_in_memory=False,
        cache_policy=KeptAt(path=path),
        result_serializer=PLAIN,
        result_storage=storage,
    )


@retry(
    retry=retry_if_exception_type(PrefectHTTPStatusError),
    stop=stop_after_attempt(5),
    wait=wait_fixed(1),
    before_sleep=before_sleep_log(log, logging.WARNING),
    reraise=True,
)
async def save_record_storage(root: str) -> RecordStorage:
    """The block for a storage root, saved on the server.

    A server that starts for the first time is still registering its own block types, and may refuse: retried.
    """
    block = RecordStorage(root=Store(root).url)
    await block.save(f"millrace-{hashlib.sha256(block.root.encode()).hexdigest()[:12]}", overwrite=True)
    return block
