"""Which rank sends which tensors to engines, and which tensors stay together."""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.connectors.trainers.megatron.weights.hf_tensors import hf_names, hf_tensors, writes
from millrace.connectors.trainers.weights.buckets import JOINED, TensorGroup, Unit
from millrace.core.families.architecture import architecture
from millrace.core.families.tensors import stacked_names


def _units(tensors: Iterator[tuple[str, Tensor]], hf: dict[str, Any]) -> Iterator[Unit]:
    """The tensors, with those of a layer that engines join held until all of them are there."""
    joined = JOINED if architecture(hf).q_rank else ()
    held: dict[str, Unit] = {}
    for name, tensor in tensors:
        layer, _, rest = name.partition(".self_attn.")
        if rest not in joined:
            yield [(name, tensor)]
            continue
        unit = held.setdefault(layer, [])
        unit.append((name, tensor))
        if len(unit) == len(joined):
            yield held.pop(layer)
    assert not held, f"a rank has only a part of what engines join, in {sorted(held)}"


def sections(model: RankModel, hf: dict[str, Any]) -> list[TensorGroup]:
    """The sections of all ranks, in which every tensor occurs once. All ranks must call it."""
    stacked = bool(stacked_names(architecture(hf)))
    of_experts = (
        mpu.get_expert_tensor_and_model_parallel_group()
        if stacked
        else mpu.get_expert_tensor_parallel_group()
    )

    def units(experts: bool | None) -> Callable[[], Iterator[Unit]]:
        return lambda: _units(hf_tensors(model, hf, experts), hf)

    groups = {True: of_experts, False: mpu.get_tensor_model_parallel_group()}
    gatherers = {experts: tuple(dist.get_process_group_ranks(group)) for experts, group in groups.items()}
    if mpu.get_pipeline_model_parallel_world_size() == mpu.get_expert_model_parallel_world_size() == 1:
        return [TensorGroup(dist.get_rank(), gatherers[False], units(None), broadcast=False)]
    owned = {
        experts: group
        for experts, group in gatherers.items()
        if writes(experts, stacked=stacked and experts)
        and next(hf_names(model, hf, experts), None) is not None
    }
    owned_by_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(owned_by_ranks, owned)
    return [
        TensorGroup(owner, group, units(experts), broadcast=True)
        for owner, parts in enumerate(owned_by_ranks)
        for experts, group in parts.items()
    ]
