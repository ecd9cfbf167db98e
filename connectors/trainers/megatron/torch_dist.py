"""The state of this trainer in megatron-core's torch_dist format, which loads under any layout of tensor, pipeline, context, expert
and data parallelism.

Knows nothing of which files a checkpoint has, nor of when it is complete.
"""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter

from millrace.connectors.trainers.checkpoint.files_of_ranks import read_files, write_files
from millrace.core.errors import TrainerError


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
        write_files(mcore_to_pyt_state_dict(by_key, False), checkpoint_dir, planner, self._writer)


def write(state: dict[str, Any], folder: Path, writer: FileSystemWriter | None) -> None:
    """Write this rank's part of a sharded state."""
    dist_checkpointing.save(state, str(folder), SynchronousSave("torch_dist", 1, writer=writer))


def read(sharded: dict[str, Any], folder: Path, files: set[str], url: str) -> dict[str, Any]:
    """The stored state in place of a sharded one. files: names of the checkpoint's files. Raises TrainerError if it does not fit."""
    state: dict[str, Any] = {}
    try:
        read_files(folder, files, lambda: state.update(dist_checkpointing.load(sharded, str(folder))))
    except (CheckpointingException, KeyError) as error:
        raise TrainerError(
            f"does not fit the configured model: {error}",
            where=url,
            remedy="load it with the model that it was saved from",
        ) from error
    return state
