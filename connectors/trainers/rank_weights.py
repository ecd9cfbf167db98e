"""Reads a rank's weights for others: as Hugging Face files, as buckets, and as broadcasts to engines.

Owns the bucket stream and rank 0's broadcast group. Reading does not need the GPU memory that a rank releases to engines.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.core.contracts.handles import BroadcastGroup
from millrace.core.errors import TrainerError
from millrace.core.families.served_files import ALONE, Served

if TYPE_CHECKING:
    from millrace.connectors.trainers.weights.buckets import BucketStream, TensorGroup
    from millrace.connectors.trainers.weights.engine_group import EngineGroup
    from millrace.core.config import RunConfig
    from millrace.core.contracts.task_records import FileRecord
    from millrace.core.contracts.weight_bucket import WeightBucket

REBUILD = "end the run's trainer by `millrace stop RUN` and start the run again: it is rebuilt"


class RankWeights(ABC):
    """The part of a trainer rank that reads weights. A subclass builds the policy and knows its version."""

    config: RunConfig
    device: Any

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.version: int | None = None
        self._stream: BucketStream | None = None
        self._buckets: Iterator[WeightBucket] = iter(())
        self._engines: EngineGroup | None = None

    @abstractmethod
    def _working(self, what: str, *, everything: bool = True) -> contextlib.AbstractContextManager[None]:
        """A context in which the rank counts as busy."""

    @abstractmethod
    def _sections(self) -> list[TensorGroup]:
        """Which ranks hold which tensors. All ranks must call it."""

    @abstractmethod
    def _write_export(self, folder: Path, served: Served, merged: bool) -> None:
        """Write this rank's part of an export into a folder: all ranks have the same one, or each its own."""

    def export(self, directory: str, version: int, merged: bool = False) -> None:
        """Write the weights as a Hugging Face folder that all ranks can see, or adapters that are not `merged` as a PEFT folder."""
        from millrace.connectors.trainers.weights.export_folder import in_place

        self._check_version(version)
        with self._working("export", everything=False), in_place(directory) as aside:
            self._write_export(aside, ALONE, merged)

    def upload(
        self, url: str, version: int, served: Served = ALONE, merged: bool = False
    ) -> list[FileRecord]:
        """Write the same to a folder in any storage; returns this rank's files."""
        from millrace.connectors.trainers.weights.export_folder import uploaded

        self._check_version(version)
        with self._working("export", everything=False):
            return uploaded(url, lambda folder: self._write_export(folder, served, merged))

    def bucket(self, version: int, number: int, size: int, share: bool) -> WeightBucket:
        """Bucket `number` of the weights, which stays in this rank's memory until the next one; 0 starts a new pass."""
        from millrace.connectors.trainers.weights.buckets import BucketStream

        self._check_version(version)
        with self._working("bucket", everything=False):
            if number == 0:
                self._stream = BucketStream(self._sections(), size, self.device, share=share)
                self._buckets = iter(self._stream)
            return next(self._buckets)

    def end_buckets(self) -> None:
        """Free the bucket. PyTorch caches its memory for the next step and the next pass, until the rank is offloaded."""
        self._stream, self._buckets = None, iter(())

    def broadcast_group(self) -> BroadcastGroup | None:
        """The group through which this rank sends buckets to engines, if one is open."""
        return self._engines.description if self._engines else None

    def open_broadcast(self, name: str, members: list[str], loopback: bool) -> BroadcastGroup:
        """Open a group that engines can join. Replaces any previous group."""
        from millrace.connectors.trainers.weights.engine_group import EngineGroup

        self.close_broadcast()
        self._engines = EngineGroup(name, members, loopback=loopback, gpu=self.device.type == "cuda")
        return self._engines.description

    def enter_broadcast(self, size: int) -> None:
        """Join the group together with the engines' `size` - 1 ranks."""
        assert self._engines is not None, "open_broadcast comes first"
        self._engines.enter(size)

    def broadcast_bucket(self, timeout_s: float) -> None:
        """Broadcast the bucket to the group."""
        assert self._engines is not None, "open_broadcast comes first"
        assert self._stream is not None, "bucket comes first"
        assert self._stream.flat is not None
        with self._working("broadcast_bucket", everything=False):
            self._engines.send(self._stream.flat, timeout_s)

    def close_broadcast(self) -> None:
        """Leave the group."""
        if self._engines is not None:
            self._engines.close()
        self._engines = None

    def _check_version(self, version: int, asked: str = "") -> None:
        """Raise TrainerError if the rank holds another version. asked: what it cannot do then, for the message."""
        if version != self.version:
            why = f" {asked}" if asked else f", not {version}"
            raise TrainerError(f"rank {self.rank} holds weight version {self.version}{why}", remedy=REBUILD)
