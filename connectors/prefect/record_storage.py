"""The place where Prefect stores the results of tasks: files below the storage root, at paths that the caller names.

They are written through the Store, whole or not at all, each with its own hash, and with the same retries as other files. Knows
nothing of what a result means or which tasks exist. Do not change the block's slug, fields or docstring: servers identify the
block type by its slug and a hash of the others.
"""

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

# A record names its serializer, and Prefect would import any such name, even pickle. All of our records are plain JSON.
PLAIN = JSONSerializer(object_encoder=f"{__name__}.encoded", object_decoder=None)
P = ParamSpec("P")
R = TypeVar("R")


def encoded(value: Any) -> str:
    """An exception's text: Prefect wants to store a failed task's, which RecordStorage drops. Raises TypeError for anything else."""
    if isinstance(value, BaseException):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a record")


class RecordStorage(WritableFileSystem):
    """A storage root as Prefect sees it: nothing but its URL; credentials come from the environment."""  # hashed

    _block_type_name = "millrace storage root"
    _block_type_slug = "millrace-storage-root"

    root: str = Field(description="Path or fsspec URL that holds the runs.")
    _fence: Fence | None = PrivateAttr(None)  # private attributes are not sent to the server
    _run_id: str | None = PrivateAttr(None)

    def drive_under(self, fence: Fence | None, run_id: str | None) -> None:
        """From now on write records only while the fence holds, and with the run's id."""
        self._fence, self._run_id = fence, run_id

    async def read_path(self, path: str) -> bytes:
        """A record's bytes, with the result as plain JSON. Raises CorruptFileError if the record changed since it was written."""
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
        """Write a record, whole or not at all; anything else is dropped. Its seal names the path inside the run, without the run's name."""
        if "/" not in path:
            return  # the exception of a failed task: nothing reads it, and the server has its message
        name, place = path.split("/", 1)
        run = Store(self.root).child(name)
        run.fence, run.walls = self._fence, run.root
        await asyncio.to_thread(run.write_sealed, place, json.loads(content), run=self._run_id)


@dataclass
class KeptAt(CachePolicy):
    """Cache policy that stores a task's result at one path below the storage root, for any inputs."""

    path: str = ""

    def compute_key(
        self,
        task_ctx: TaskRunContext,
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],
        **kwargs: Any,
    ) -> str | None:
        """The path. Prefect looks there before it runs the task, and writes there afterwards."""
        return self.path


def kept_at(path: str, task: Task[P, R], storage: RecordStorage) -> Task[P, R]:
    """The task with its result stored as JSON at a path below the storage root. It does not run if the file exists.

    Turns off Prefect's cache of the newest thousand results in memory, which nothing reads.
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
    """Save the block for a storage root on the server, and return it.

    Retries, since a server that starts for the first time may refuse while it registers its block types.
    """
    block = RecordStorage(root=Store(root).url)
    await block.save(f"millrace-{hashlib.sha256(block.root.encode()).hexdigest()[:12]}", overwrite=True)
    return block
