"""Writes all ranks' parts of a checkpoint with PyTorch's saver, and reads them as data.

Owns the errors of both. Knows nothing of what the files hold.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, SavePlanner, save
from torch.distributed.checkpoint.api import CheckpointException

from millrace.connectors.trainers.checkpoint.folders import on_every_rank
from millrace.connectors.trainers.checkpoint.stored_metadata import LOAD_ANOTHER, as_data, read_metadata
from millrace.connectors.trainers.patches import checkpoints_read_as_data
from millrace.core.errors import StorageError, TrainerError


def write_files(
    state: dict[str, Any], folder: str | Path, planner: SavePlanner, writer: FileSystemWriter | None = None
) -> None:
    """Write this rank's part: one file, synced to disk. Every rank must call it. Raises StorageError on all ranks if one fails.

    writer: takes the place of PyTorch's.
    """
    try:
        save(state, storage_writer=writer or FileSystemWriter(folder), planner=planner)
    except CheckpointException as error:  # raised on every rank if any rank fails
        cause = next((failure for failure, _ in error.failures.values()), error)
        # PyTorch's error does not say that the disk is full
        free = shutil.disk_usage(folder).free / 2**20
        raise StorageError(
            f"cannot write the checkpoint; its disk has {free:,.0f} MiB free: {cause}",
            where=str(folder),
            remedy="free space or repair the disk and start again; nothing committed is lost",
        ) from error


def read_files(folder: Path, files: set[str], read: Callable[[], None]) -> None:
    """Call `read`, which reads the folder's files, as data: no name in a file is imported or called. Every rank must call it.

    files: names of the checkpoint's files. Raises CorruptFileError, before anything is loaded, if the table of contents names code;
    TrainerError if an object does.
    """
    metadata = on_every_rank(lambda: read_metadata(folder, files))[dist.get_rank()]
    with _readable(folder), checkpoints_read_as_data(metadata, as_data):
        read()


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except UnpicklingError as error:
        raise _unreadable(folder, error) from error
    except CheckpointException as error:  # raised on every rank if any rank fails
        raise _unreadable(folder, next((failure for failure, _ in error.failures.values()), error)) from error


def _unreadable(folder: Path, error: BaseException) -> TrainerError:
    reason = str(error).partition("\n")[0]
    if isinstance(error, UnpicklingError):
        reason = f"a file of it holds more than data: {reason}"
    return TrainerError(f"cannot be loaded: {reason}", where=str(folder), remedy=LOAD_ANOTHER)
