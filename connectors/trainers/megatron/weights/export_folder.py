"""The folder of an export: on a disk, where ranks share it until it is whole, or in any storage, where each uploads its files.

Knows nothing of what is exported.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from millrace.connectors.host.own_folders import temporary_folder
from millrace.connectors.storage.store import split_url
from millrace.core.contracts.task_records import FileRecord


@contextlib.contextmanager
def in_place(directory: str) -> Iterator[Path]:
    """A new folder that ranks write to, renamed to `directory` at the end. All ranks must enter it."""
    target = Path(directory)
    aside = target.with_name(f".aside-{target.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    yield aside
    if dist.get_rank() == 0:
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
    dist.barrier()


def uploaded(url: str, write: Callable[[Path], None]) -> list[FileRecord]:
    """What this rank writes to a folder on its node's disk, uploaded to `url`; the records of the files, relative to the folder."""
    store, name = split_url(url)
    with temporary_folder("millrace-export") as local:
        write(Path(local))
        entries = store.upload_dir(local, name)
    files = [entry.model_copy(update={"path": entry.path.removeprefix(f"{name}/")}) for entry in entries]
    return [file.record() for file in files]
