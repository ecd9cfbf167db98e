"""Main parameters and moments of a distributed optimizer as they are saved and loaded: parameter by parameter, in its shape.

A distributed optimizer cuts a bucket of parameters into one range a data parallel rank, so a parameter may lie on several
ranks. The one that holds most of it is its owner and saves it. What a rank holds whole is saved from where it lies; the pieces
of the others are sent to their owner. megatron-core's own way gathers all of it in each rank's host memory.

Owns which rank saves what. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

KEYS = ("param", "exp_avg", "exp_avg_sq")
PREFIX = "optimizer.state"


@dataclass(frozen=True)
class Piece:
    """Elements start to end of a flattened parameter, on one data parallel rank."""

    rank: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.end - self.start


def pieces_of(start: int, end: int, bucket_start: int, share: int) -> list[Piece]:
    """Where a parameter lies, in the order of ranks.

    start, end: its elements in the buffer. bucket_start: where its bucket begins there. share: elements of the bucket on
    each rank.
    """
    pieces = []
    for rank in range((start - bucket_start) // share, (end - 1 - bucket_start) // share + 1):
        first = bucket_start + rank * share
        pieces.append(Piece(rank, max(start, first) - start, min(end, first + share) - start))
    return pieces


def owner_of(pieces: list[Piece]) -> int:
    """The rank that saves a parameter: the first of those that hold most of it."""
    return max(pieces, key=lambda piece: (piece.size, -piece.rank)).rank


def sharded_parameter_state(
    optimizer: Any, model_state: dict[str, Any], *, loading: bool
) -> dict[int, dict[str, Any]]:
    """Sharded tensors of each parameter by its number, for saving or to load into.

    For saving: of the parameters that this rank owns. For loading: of all that it holds a piece of, each whole. All data
    parallel ranks must call it at the same time.
    """
    group = optimizer.data_parallel_group
    own = dist.get_rank(group)
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    described = {entry.data: entry for entry in _leaves(sharded)}
    state: dict[int, dict[str, Any]] = {}
    for number, (parameter, pieces) in enumerate(_placed(optimizer, group)):
        owner = owner_of(pieces)
        holds = any(piece.rank == own for piece in pieces)
        if not holds:
            continue
        if loading:
            tensors = {key: torch.empty(parameter.numel(), dtype=torch.float32) for key in KEYS}
        else:
            tensors = _joined(optimizer, parameter, pieces, owner, own, group)
            if owner != own:
                continue
        copy = 0 if owner == own else own + 1  # 0: the one that is saved
        state[number] = _described(described[parameter], tensors, optimizer, copy)
    return state


def _placed(optimizer: Any, group: Any) -> Iterator[tuple[Any, list[Piece]]]:
    """Every parameter of the optimizer, in the order of its buffers, and where it lies."""
    ranks = dist.get_world_size(group)
    for buffer in optimizer.buffers:
        for parameter, (start, end, bucket_number) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_number]
            yield parameter, pieces_of(start, end, bucket.offset, bucket.grad_data.numel() // ranks)


def _joined(
    optimizer: Any, parameter: Any, pieces: list[Piece], owner: int, own: int, group: Any
) -> dict[str, Tensor]:
    """The owner's tensors of a parameter, flat and whole; another rank sends its piece and gets an empty mapping."""
    held = optimizer._get_main_param_and_optimizer_states(parameter)
    parts = {key: held[key].detach().flatten() for key in KEYS}
    if len(pieces) == 1:
        return parts
    if owner != own:
        _exchange(
            [dist.P2POp(dist.isend, parts[key], dist.get_global_rank(group, owner), group) for key in KEYS]
        )
        return {}
    joined = {key: part.new_empty(parameter.numel()) for key, part in parts.items()}
    received = []
    for piece in pieces:
        for key in KEYS:
            target = joined[key][piece.start : piece.end]
            if piece.rank == own:
                target.copy_(parts[key])
            else:
                peer = dist.get_global_rank(group, piece.rank)
                received.append(dist.P2POp(dist.irecv, target, peer, group))
    _exchange(received)
    return joined


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _described(entry: Any, tensors: dict[str, Tensor], optimizer: Any, copy: int) -> dict[str, Any]:
    """The tensors as the parameter's model entry is sharded: over tensor, pipeline and expert parallel ranks."""
    *others, _ = entry.replica_id
    state = {}
    for key, tensor in tensors.items():
        changes: dict[str, Any] = {
            "key": f"{PREFIX}.{key}.{entry.key}",
            "data": tensor.view(entry.data.shape),
            "replica_id": (*others, optimizer.distributed_optimizer_instance_id + copy),
        }
        if not isinstance(entry, ShardedTensorFactory):
            changes["dtype"] = tensor.dtype
        state[key] = replace(entry, **changes)
        state[key].validate_metadata_integrity()
    return state


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree
