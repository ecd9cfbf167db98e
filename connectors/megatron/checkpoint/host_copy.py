"""This rank's part of a checkpoint, copied to memory of the host that another process can map.

Owns the memory and where each tensor lies in it. Knows nothing of files.
"""

from __future__ import annotations

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
class Place:
    """Where a tensor lies in the memory."""

    start: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class HostCopy:
    """What this rank writes: a plan whose items' data are bytes here, or lie in the memory."""

    plan: SavePlan
    data: list[Place | bytes]  # of each item of the plan
    descriptor: int  # of the memory
    size: int  # of the memory, bytes


class HostMemory:
    """Memory without a name, which grows to the largest copy and is then used again. On a GPU's host it is pinned."""

    def __init__(self) -> None:
        self.size = 0
        self._pinned = 0  # its address
        self.descriptor = -1
        self._view: mmap.mmap | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, size: int, *, pinned: bool) -> None:
        """Begin to take `size` bytes, so that the first copy finds them: 50 GB take the system tens of seconds."""
        assert self._view is None, "before the first copy"
        self._map(size)
        if pinned:
            self._preparing = threading.Thread(target=self._pin, daemon=True)
            self._preparing.start()

    def take(self, size: int, *, pinned: bool) -> mmap.mmap:
        """At least `size` bytes. What was taken before must be free by now."""
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
        torch.frombuffer(self._view, dtype=torch.uint8).zero_()  # takes its pages
        address = _address(self._view)
        torch.cuda.cudart().cudaHostRegister(address, self.size, 0)
        self._pinned = address

    def _until_prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def close(self) -> None:
        """Give it back. Who maps it keeps it."""
        self._until_prepared()
        if self._view is None:
            return
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
        self._view.close()
        os.close(self.descriptor)
        self._view, self.size, self._pinned, self.descriptor = None, 0, 0, -1


class CopyingWriter(FileSystemWriter):
    """In place of files, a copy in memory; the metadata that the coordinator would write are kept."""

    def __init__(self, folder: str | Path, memory: HostMemory) -> None:
        super().__init__(folder)
        self._memory = memory
        self.copy: HostCopy | None = None
        self.metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Copy every item's data. Returns when all of it is on the host."""
        whole: list[Any] = [planner.resolve_data(item) for item in plan.items]
        places: list[Place | bytes] = []
        size = 0
        for item, value in zip(plan.items, whole, strict=True):
            if item.type == WriteItemType.BYTE_IO:
                places.append(value.getvalue())
            else:
                places.append(Place(size, tuple(value.shape), value.dtype))
                size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        size = max(size, mmap.PAGESIZE)
        on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in whole)
        view = self._memory.take(size, pinned=on_gpu)
        for value, place in zip(whole, places, strict=True):
            if isinstance(place, Place) and value.numel():
                tensor_at(view, place).copy_(value.detach(), non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        own = SavePlan(items=list(plan.items), storage_data=plan.storage_data)
        self.copy = HostCopy(own, places, self._memory.descriptor, size)
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Keep the metadata until the files are written."""
        self.metadata = metadata


def tensor_at(view: Any, place: Place) -> Tensor:
    """The tensor that lies there, without a copy."""
    count = 1
    for size in place.shape:
        count *= size
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(view, dtype=place.dtype, count=count, offset=place.start)
    return flat.view(place.shape)


def _unnamed(size: int) -> int:
    """A descriptor of memory; of a file without a name where the system has no such memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("millrace-checkpoint")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _address(view: mmap.mmap) -> int:
    return torch.frombuffer(view, dtype=torch.uint8, count=1).data_ptr()
