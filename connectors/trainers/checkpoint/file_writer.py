"""Writes one rank's part of a checkpoint from its copy in memory, in the calling thread, and hashes the files meanwhile.

Owns torch's file format. Knows nothing of processes, nor of other ranks. megatron's own writer starts a manager process and forks
a process per file: that takes seconds even for a small checkpoint, and the forked process has running communication threads. The
files are the same.
"""

import contextlib
import ctypes
import hashlib
import io
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, WriteResult
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from millrace.connectors.host.own_folders import temporary_folder
from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.checkpoint.host_copy import HostCopy, Offset, tensor_at

# A file goes to the disk in pieces of this size, at most two of them in memory. Otherwise other writes would queue behind the
# whole checkpoint, and its pages would evict others. Four ranks write 16 files: with pieces of 4 MiB a small file waited 0.2 to
# 0.4 s, and the disk was no faster.
PIECE = 2**19
WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4  # of sync_file_range(2)


@dataclass(frozen=True)
class WriteTask:
    """The task of a writer: the data and its destination."""

    url: str  # of the checkpoint
    copy: HostCopy
    files: int  # number of files for the data, and of threads that write them
    parent: int  # id of the process that started this one


@dataclass(frozen=True)
class Written:
    """The files that were written."""

    results: list[WriteResult]
    files: list[FileEntry]


def write(task: WriteTask) -> Written:
    """Write the data into the checkpoint's folder; for an object store through a temporary folder."""
    store = Store(task.url)
    if store.local:
        results, entries = _write_files(Path(store.root), task)
        return Written(results, entries)
    with temporary_folder("millrace-save") as folder:
        results, _ = _write_files(Path(folder), task)
        return Written(results, store.upload_dir(folder, ""))


def _write_files(folder: Path, task: WriteTask) -> tuple[list[WriteResult], list[FileEntry]]:
    with mmap.mmap(task.copy.descriptor, task.copy.size, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        source = _Source(task.copy, view)
        writer = FileSystemWriter(folder, thread_count=task.files)
        writer.fs = hashing = _Hashing()
        # CRCs take a third of the time, and every file has a SHA-256
        torch.serialization.set_crc32_options(False)
        results: list[WriteResult] = writer.write_data(task.copy.plan, cast(SavePlanner, source)).value()
        source.data.clear()  # its tensors keep the view open
    return results, sorted(hashing.entries, key=lambda entry: entry.path)


class _Source:
    """Replaces a planner for the writer, which only asks it for items' data."""

    def __init__(self, copy: HostCopy, view: mmap.mmap) -> None:
        self.data: dict[Any, Offset | bytes] = {
            item.index: data for item, data in zip(copy.plan.items, copy.data, strict=True)
        }
        self._view = view

    def resolve_data(self, item: WriteItem) -> Any:
        """An item's data: a tensor in the copy, or a file object of bytes."""
        data = self.data[item.index]
        if isinstance(data, Offset):
            return tensor_at(self._view, data)
        assert item.type == WriteItemType.BYTE_IO
        return io.BytesIO(data)


class _Hashing(FileSystem):
    """A file system that hashes files while they are written."""

    def __init__(self) -> None:
        self.entries: list[FileEntry] = []

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file that is written from start to end."""
        with super().create_stream(path, mode) as stream:
            hashed = _HashedStream(stream)
            yield hashed
        self.entries.append(
            FileEntry(path=Path(path).name, sha256=hashed.sha256.hexdigest(), size=hashed.size)
        )


class _HashedStream:
    """A stream that hashes, and can only be appended to."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream: Any = stream
        self.sha256 = hashlib.sha256()
        self.size = self._started = 0
        self._pending = slice(0, 0)  # the piece that the disk is writing

    def write(self, data: Any) -> int:
        """Write and hash the data."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            self._write(view[start : start + PIECE])
        return len(view)

    def _write(self, piece: memoryview) -> None:
        self.sha256.update(piece)
        self._stream.write(piece)
        self.size += len(piece)
        if self.size - self._started >= PIECE:
            self._stream.flush()
            begun = slice(self._started, self.size)
            _to_disk(self.fileno(), begun, WRITE)
            _to_disk(self.fileno(), self._pending, WAIT_BEFORE | WRITE | WAIT_AFTER)
            _forget(self.fileno(), self._pending)
            self._pending, self._started = begun, self.size

    def tell(self) -> int:
        """Number of bytes written."""
        return self.size

    def flush(self) -> None:
        """Pass buffered bytes to the operating system."""
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: torch closes the stream after each item, and the file continues."""

    def fileno(self) -> int:
        """The file's descriptor, for syncing to disk."""
        descriptor: int = self._stream.fileno()
        return descriptor


def _to_disk(descriptor: int, part: slice, how: int) -> None:
    """Ask the system to write these bytes to disk. Errors are ignored: the sync at the file's end reports them."""
    if sys.platform == "linux" and part.stop > part.start:
        where = (ctypes.c_int64(part.start), ctypes.c_int64(part.stop - part.start))
        ctypes.CDLL(None).sync_file_range(ctypes.c_int(descriptor), *where, how)


def _forget(descriptor: int, part: slice) -> None:
    """Let the system drop cached pages that are on disk. Errors are ignored."""
    if hasattr(os, "posix_fadvise") and part.stop > part.start:
        os.posix_fadvise(descriptor, part.start, part.stop - part.start, os.POSIX_FADV_DONTNEED)
