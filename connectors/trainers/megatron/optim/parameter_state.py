"""The optimizer's sharded state, saved under one layout and loaded under any other: parameter by parameter, each in its shape.

A distributed optimizer cuts a bucket of parameters into one range per data parallel rank, so a parameter may be on several
ranks. One of them owns and saves it: the rank with the least to save so far, so that all ranks save about as much. A parameter
that is whole on its owner is saved in place; for others, pieces are sent to the owner. megatron-core instead gathers all of
the state in each rank's host memory.

Owns which rank saves which parameter. Knows nothing of files.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor

from millrace.connectors.trainers import patches
from millrace.connectors.trainers.megatron.optim import fused_adamw
from millrace.connectors.trainers.megatron.optim.step_numbers import parts_of

KEYS = ("param", "exp_avg", "exp_avg_sq")
PREFIX = "optimizer.state"


@dataclass(frozen=True)
class ParameterSlice:
    """Elements start to end of a flattened parameter, on one data parallel rank."""

    rank: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.start


def pieces_of(start: int, end: int, bucket_start: int, share: int) -> list[ParameterSlice]:
    """The pieces of a parameter, in the order of ranks.

    start, end: its elements in the buffer. bucket_start: its bucket's first element. share: elements of the bucket on each
    rank.
    """
    pieces = []
    for rank in range((start - bucket_start) // share, (end - 1 - bucket_start) // share + 1):
        first = bucket_start + rank * share
        pieces.append(ParameterSlice(rank, max(start, first) - start, min(end, first + share) - start))
    return pieces


def owners_of(placed: Sequence[list[ParameterSlice]]) -> list[int]:
    """The rank that saves each parameter, computed from the pieces of all parameters, equally on every rank.

    A parameter on a single rank belongs to that rank. The others are assigned from the largest to the smallest. Each goes to the
    rank with a piece of it that has the fewest elements so far. The largest piece would be a bad criterion: a bucket
    with one large parameter is cut into equal pieces, so the first rank would always get it, half of 4 billion parameters over
    four ranks.
    """
    elements = [pieces[-1].end for pieces in placed]
    owned: Counter[int] = Counter()
    owners = [0] * len(placed)
    for number in sorted(range(len(placed)), key=lambda number: (len(placed[number]) > 1, -elements[number])):
        owner = min((piece.rank for piece in placed[number]), key=lambda rank: (owned[rank], rank))
        owners[number] = owner
        owned[owner] += elements[number]
    return owners


def bytes_saved(optimizer: Any) -> int:
    """Bytes of main parameters and moments that this rank owns."""
    own = dist.get_rank(optimizer.data_parallel_group)
    placed = list(_placed(optimizer))
    owners = owners_of([pieces for _, pieces in placed])
    owned: int = sum(
        parameter.numel() for (parameter, _), owner in zip(placed, owners, strict=True) if owner == own
    )
    return len(KEYS) * torch.float32.itemsize * owned


def sharded_parameter_state(
    optimizer: Any, model_state: dict[str, Any], *, loading: bool
) -> dict[int, dict[str, Any]]:
    """Sharded tensors of parameters by number, to save or to load into.

    For saving: the parameters that this rank owns. For loading: all parameters of which it holds a piece, each whole. All data
    parallel ranks must call it at the same time.
    """
    group = optimizer.data_parallel_group
    own = dist.get_rank(group)
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    described = {entry.data: entry for entry in _leaves(sharded)}
    state: dict[int, dict[str, Any]] = {}
    placed = list(_placed(optimizer))
    owners = owners_of([pieces for _, pieces in placed])
    for number, ((parameter, pieces), owner) in enumerate(zip(placed, owners, strict=True)):
        holds = any(piece.rank == own for piece in pieces)
        if not holds:
            continue
        if loading:
            tensors = {key: torch.empty(parameter.numel(), dtype=torch.float32) for key in KEYS}
        else:
            tensors = _joined(optimizer, parameter, pieces, owner, own, group)
            if owner != own:
                continue
        copy = 0 if owner == own else own + 1  # copy 0 is saved
        state[number] = _described(described[parameter], tensors, optimizer, copy)
    return state


def _placed(optimizer: Any) -> Iterator[tuple[Any, list[ParameterSlice]]]:
    """All parameters of the optimizer, in the order of its buffers, with their pieces."""
    ranks = dist.get_world_size(optimizer.data_parallel_group)
    for buffer in optimizer.buffers:
        for parameter, (start, end, bucket_number) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_number]
            yield parameter, pieces_of(start, end, bucket.offset, bucket.grad_data.numel() // ranks)


def _joined(
    optimizer: Any, parameter: Any, pieces: list[ParameterSlice], owner: int, own: int, group: Any
) -> dict[str, Tensor]:
    """A parameter's flat, whole tensors on its owner. Another rank sends its piece and gets an empty mapping."""
    held = optimizer._get_main_param_and_optimizer_states(parameter)
    parts = {key: held[key].detach().flatten() for key in KEYS}
    if len(pieces) == 1:
        return parts
    # NCCL sends no host memory, where a rank may hold its piece
    parts = {key: part.to(parameter.device) for key, part in parts.items()}
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
    return {key: tensor.to(held["param"].device) for key, tensor in joined.items()}


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _described(entry: Any, tensors: dict[str, Tensor], optimizer: Any, copy: int) -> dict[str, Any]:
    """The tensors, sharded like the parameter's model entry over tensor, pipeline and expert parallel ranks."""
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


SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def optimizer_state(optimizer: Any, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """The optimizer's sharded state dict, in the form that loads under any layout."""
    parts = parts_of(optimizer)
    for part in parts:
        fill_state(part.optimizer)
    with (
        patches.empty_parts_saved(_empty(parts)),
        patches.parameters_saved_in_place(_distributed(parts), sharded_parameter_state),
    ):
        state: dict[str, Any] = optimizer.sharded_state_dict(
            model_state, is_loading=loading, metadata=SHARDING
        )
    for part in parts:
        _unshare_steps(part.optimizer)
    return state


def bytes_of_optimizer(optimizer: Any) -> int:
    """Bytes of main parameters and moments that this rank saves."""
    return sum(
        bytes_saved(part) if isinstance(part, DistributedOptimizer) else _bytes_if_first(part)
        for part in parts_of(optimizer)
    )


def _bytes_if_first(part: Any) -> int:
    """The same if every data parallel rank has the whole state: the first rank saves it. In fp32 the model has the main parameters."""
    if mpu.get_data_parallel_rank(with_context_parallel=True):
        return 0
    keys = len(KEYS) - isinstance(part, FP32Optimizer)
    parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    return sum(keys * torch.float32.itemsize * parameter.numel() for parameter in parameters)


def load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    """Load moments, main parameters and the number of steps, which all parameters share.

    The numbers of the parameter groups (rates, betas, ...) stay the configuration's. So does their division into parts: a layout
    has a separate part for experts if other ranks hold them than hold the rest, and a stage without experts has none.
    """
    parts, steps = parts_of(optimizer), _steps_of(state)
    configured = [_group_numbers(part) for part in parts]
    # a part without parameters has nothing stored
    loaded = [state] if len(parts) == 1 else [state.get(number, {}) for number in range(len(parts))]
    try:
        with (
            patches.empty_parts_saved(_empty(parts)),
            patches.steps_kept_on_load(_distributed(parts)),
            torch.no_grad(),
        ):
            states = [_state_of_part(part, own, steps) for part, own in zip(parts, loaded, strict=True)]
            optimizer.load_state_dict(states[0] if len(parts) == 1 else dict(enumerate(states)))
    finally:
        for part, numbers in zip(parts, configured, strict=True):
            for group, own in zip(part.optimizer.param_groups, numbers, strict=True):
                group.update(own)
            _unshare_steps(part.optimizer)
        fused_adamw.install(optimizer)


def _steps_of(state: dict[Any, Any]) -> Any:
    """The number of steps, from the first part that the saving rank had. A number of 0 may not be stored."""
    for part in (state, *(value for key, value in state.items() if isinstance(key, int))):
        adam = part.get("optimizer", part)
        for group in adam.get("param_groups", ()):
            if "step" in group:
                return group["step"]
        if "common_step" in adam.get("state", {}):
            return adam["state"]["common_step"]
    return torch.zeros((), dtype=torch.float32)


def _state_of_part(part: Any, loaded: dict[str, Any], steps: Any) -> dict[str, Any]:
    """A part's own state with the loaded tensors and number of steps."""
    own: dict[str, Any] = part.state_dict()
    adam = own.get("optimizer", own)
    if isinstance(part, DistributedOptimizer):
        for group in adam["param_groups"]:
            group["step"] = steps
        kind = SHARDING["distrib_optim_sharding_type"]
        return {**own, "param_state": loaded.get("param_state", {}), "param_state_sharding_type": kind}
    adam["state"] = {**loaded.get("optimizer", loaded)["state"], "common_step": steps}
    mains = "fp32_from_fp16_params"
    return {**own, mains: loaded[mains]} if mains in own else own


def _group_numbers(part: Any) -> list[dict[str, Any]]:
    """The parameter groups without their parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in part.optimizer.param_groups
    ]


def _distributed(parts: list[Any]) -> list[Any]:
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def _empty(parts: list[Any]) -> list[Any]:
    """The parts without parameters."""
    return [
        part
        for part in _distributed(parts)
        if not any(group["params"] for group in part.optimizer.param_groups)
    ]


def fill_state(adam: torch.optim.Optimizer) -> None:
    """Give Adam the state that its first step would create. A real step would decay weights."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if not state:
                device = parameter.device if group.get("fused") else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)


def _unshare_steps(adam: torch.optim.Optimizer) -> None:
    """Give each parameter a separate step tensor. After loading all share one, and each parameter would increment it."""
    for state in adam.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()
