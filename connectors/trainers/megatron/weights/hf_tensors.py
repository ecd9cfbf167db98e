"""This rank's parameters as Hugging Face tensors, gathered over tensor parallel ranks one at a time.

Owns which rank writes which tensor. Knows nothing of files, nor of the tensors' receivers.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from millrace.connectors.trainers.adapters import merged
from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.connectors.trainers.megatron.weights.adapter_tensors import pairs_of, whole_pair
from millrace.connectors.trainers.megatron.weights.hf_mapping import Mapping, lookup
from millrace.core.families.architecture import architecture


def mapped_parameters(model: RankModel, hf: dict[str, Any]) -> Iterator[tuple[torch.nn.Parameter, Mapping]]:
    """This rank's parameters with their Hugging Face tensors, in a fixed order."""
    arch = architecture(hf)
    experts = arch.experts // mpu.get_expert_model_parallel_world_size()
    expert_offset = experts * mpu.get_expert_model_parallel_rank()
    for stage in model.stages:
        layer_offset = _layer_offset(stage)
        for name, parameter in stage.named_parameters():
            if name.startswith(("value_head.", "adapters.")):
                continue  # the critic's head and adapters, which Hugging Face checkpoints do not have
            yield (
                parameter,
                lookup(name, arch, layer_offset=layer_offset, expert_offset=expert_offset),
            )


def hf_names(model: RankModel, hf: dict[str, Any], experts: bool | None = None) -> Iterator[str]:
    """Names of the Hugging Face tensors of this rank's stage, in order. `experts`: only experts' tensors, or only others."""
    every = (name for _, mapping in _each_tensor_once(model, hf, experts) for name in mapping.names)
    yield from dict.fromkeys(every)


def hf_tensors(
    model: RankModel, hf: dict[str, Any], experts: bool | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole Hugging Face tensors of this rank's stage, one at a time. All tensor parallel ranks must iterate together.

    Of a model with adapters, what these add is added to them. If tensors hold all experts of a layer, so must all expert parallel ranks.
    """
    arch = architecture(hf)
    pairs, scale = pairs_of(model)
    stacks: dict[str, list[Tensor]] = {}  # shares of this rank's experts
    for parameter, mapping in _each_tensor_once(model, hf, experts):
        _, size = tensor_parallel_place(mapping)
        shards = [parameter.detach()]
        if size > 1 and mapping.part.split is not None:
            group = (
                mpu.get_expert_tensor_parallel_group()
                if mapping.expert
                else mpu.get_tensor_model_parallel_group()
            )
            shards = [torch.empty_like(shards[0]) for _ in range(size)]
            dist.all_gather(shards, parameter.detach().contiguous(), group=group)
        for name, tensor in zip(mapping.names, mapping.whole(shards, arch), strict=True):
            if not mapping.part.stacked:
                pair = pairs.get(name.removesuffix(".weight"))
                yield name, tensor if pair is None else merged(tensor, whole_pair(pair), scale)
                continue
            stack = stacks.setdefault(name, [])
            stack.append(tensor)
            if len(stack) * mpu.get_expert_model_parallel_world_size() == arch.experts:
                yield name, _of_all_ranks(torch.stack(stacks.pop(name)))


def _of_all_ranks(experts: Tensor) -> Tensor:
    """The shares of all experts [E, ...], from those of each expert parallel rank."""
    size = mpu.get_expert_model_parallel_world_size()
    if size == 1:
        return experts
    whole = experts.new_empty(size * len(experts), *experts.shape[1:])
    dist.all_gather_into_tensor(whole, experts.contiguous(), group=mpu.get_expert_model_parallel_group())
    return whole


def tensor_parallel_place(mapping: Mapping) -> tuple[int, int]:
    """This rank's number among the tensor parallel ranks of a parameter, and the number of ranks."""
    if mapping.expert:
        return mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
    return mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()


def writes(experts: bool, *, stacked: bool = False) -> bool:
    """Whether this rank, among its replicas, writes experts' tensors (`experts`) or other tensors.

    stacked: whether they hold the experts of all ranks.
    """
    if stacked and mpu.get_expert_model_parallel_rank():
        return False
    if experts:
        return bool(mpu.get_expert_data_parallel_rank() == 0 and mpu.get_expert_tensor_parallel_rank() == 0)
    return bool(
        mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _each_tensor_once(
    model: RankModel, hf: dict[str, Any], experts: bool | None
) -> Iterator[tuple[torch.nn.Parameter, Mapping]]:
    """This rank's parameters, such that each Hugging Face tensor occurs once. Those of another type are the last."""
    seen: set[tuple[str, int]] = set()
    for parameter, mapping in sorted(mapped_parameters(model, hf), key=lambda each: not each[1].part.trained):
        if (mapping.names[0], mapping.number) in seen or _is_embedding_copy(model, parameter):
            continue
        seen.update((name, mapping.number) for name in mapping.names)
        if experts is None or mapping.expert == experts:
            yield parameter, mapping


def _is_embedding_copy(model: RankModel, parameter: Tensor) -> bool:
    """Whether a parameter is the last stage's copy of the first stage's embedding."""
    last = model.last
    return bool(
        last.share_embeddings_and_output_weights
        and not last.pre_process
        and last.post_process
        and parameter is last.output_layer.weight
    )


def _layer_offset(stage: Any) -> int:
    layers = stage.decoder.layers
    return layers[0].layer_number - 1 if len(layers) else 0
