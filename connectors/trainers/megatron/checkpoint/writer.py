"""Writes megatron's torch_dist checkpoints in the calling thread.

megatron's own writer starts a manager process and forks a process per file. That takes seconds even for a small checkpoint,
and the forked process has running communication threads. The files are the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from millrace.core.errors import StorageError


class SynchronousSave(TorchDistSaveShardedStrategy):
    """The torch_dist strategy with PyTorch's plain file writer: one file per rank, synced to disk.

    writer: replaces PyTorch's file writer.
    """

    def __init__(self, backend: str, version: int, writer: FileSystemWriter | None = None) -> None:
        super().__init__(backend, version)
        self._writer = writer

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, *_: Any, **__: Any) -> None:
        """Write this rank's shards; every rank must call it. Raises StorageError on all ranks if one fails."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=False,
            flatten_state_dict=False,
            can_run_decentralized_global_plan=False,
        )
        try:
            save(
                mcore_to_pyt_state_dict(by_key, False),
                storage_writer=self._writer or FileSystemWriter(checkpoint_dir),
                planner=planner,
            )
        except CheckpointException as error:  # raised on every rank if any rank fails
            cause = next((failure for failure, _ in error.failures.values()), error)
            # PyTorch's error does not say that the disk is full
            free = shutil.disk_usage(checkpoint_dir).free / 2**20
            raise StorageError(
                f"cannot write the checkpoint; its disk has {free:,.0f} MiB free: {cause}",
                where=str(checkpoint_dir),
                remedy="free space or repair the disk and start again; nothing committed is lost",
            ) from error
