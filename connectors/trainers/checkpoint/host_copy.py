"""Copies this rank's part of a checkpoint to host memory that another process can map.

Owns the memory and the place of each tensor in it. Knows nothing of files.
"""

import mmap
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.futures import Future

ALIGNMENT = 256


@dataclass(frozen=True)
class Offset:
    """The place of a tensor in the memory."""

    start: int  # offset in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class HostCopy:
    """The data that this rank writes: a plan, and for each of its items bytes or a place in the memory."""

    plan: SavePlan
    data: list[Offset | bytes]  # one for each item of the plan
    descriptor: int  # of the memory
    size: int  # bytes of the memory


class HostMemory:
    """Anonymous memory that grows to the largest copy and is reused. For copies from a GPU it is pinned."""

    def __init__(self) -> None:
        self.size = 0
        self._pinned = 0  # address of the pinned memory
        self.descriptor = -1
        self._view: mmap.mmap | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, size: int, *, pinned: bool) -> None:
        """Start to allocate `size` bytes in advance, since the system needs tens of seconds for 50 GB."""
        assert self._view is None, "before the first copy"
        self._map(size)
        if pinned:
            self._preparing = threading.Thread(target=self._pin, daemon=True)
            self._preparing.start()

    def take(self, size: int, *, pinned: bool) -> mmap.mmap:
        """Memory of at least `size` bytes, the same as before if it is large enough. Earlier contents must be unused."""
        self._until_prepared()
        if self._view is None or size > self.size:
            self.close()
            self._map(size)
            if pinned:
                self._pin()
        assert self._view is not None
        return self._view

    def _map(self, size: int) -> None:
        self.descriptor, self.size = _unnamed(size), size
        self._view = mmap.mmap(self.descriptor, size)

    def _pin(self) -> None:
        assert self._view is not None
        torch.frombuffer(self._view, dtype=torch.uint8).zero_()  # allocates its pages
        address = _address(self._view)
        torch.cuda.cudart().cudaHostRegister(address, self.size, 0)
        self._pinned = address

    def _until_prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def close(self) -> None:
        """Release the memory. Processes that have mapped it keep it."""
        self._until_prepared()
        if self._view is None:
            return
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
        self._view.close()
        os.close(self.descriptor)
        self._view, self.size, self._pinned, self.descriptor = None, 0, 0, -1


class CopyingWriter(FileSystemWriter):
    """A writer that copies to memory instead of files, and keeps the metadata that the coordinator would write."""

    def __init__(self, folder: str | Path, memory: HostMemory) -> None:
        super().__init__(folder)
        self._memory = memory
        self.copy: HostCopy | None = None
        self.metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Copy every item's data. Returns when all data is on the host."""
        whole: list[Any] = [planner.resolve_data(item) for item in plan.items]
        places: list[Offset | bytes] = []
        size = 0
        for item, value in zip(plan.items, whole, strict=True):
            if item.type == WriteItemType.BYTE_IO:
                places.append(value.getvalue())
            else:
                places.append(Offset(size, tuple(value.shape), value.dtype))
                size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        size = max(size, mmap.PAGESIZE)
        on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in whole)
        view = self._memory.take(size, pinned=on_gpu)
        for value, place in zip(whole, places, strict=True):
            if isinstance(place, Offset) and value.numel():
                tensor_at(view, place).copy_(value.detach(), non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        own = SavePlan(items=list(plan.items), storage_data=plan.storage_data)
        self.copy = HostCopy(own, places, self._memory.descriptor, size)
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Store the metadata until the files are written."""
        self.metadata = metadata


def tensor_at(view: Any, place: Offset) -> Tensor:
    """The tensor at a place in the memory, without a copy."""
    count = 1
    for size in place.shape:
        count *= size
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(view, dtype=place.dtype, count=count, offset=place.start)
    return flat.view(place.shape)


def _unnamed(size: int) -> int:
    """A descriptor of anonymous memory; of an unnamed file if the system has no such memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("millrace-checkpoint")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _address(view: mmap.mmap) -> int:
    return torch.frombuffer(view, dtype=torch.uint8, count=1).data_ptr()
