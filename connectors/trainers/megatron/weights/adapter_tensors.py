"""Whole adapters, gathered over the ranks that hold parts of them, and written as a PEFT folder.

Owns which rank writes: rank 0, since adapters are small beside the model. All ranks must call each function together.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from millrace.connectors.trainers.adapters import FlatPairs, write_peft
from millrace.connectors.trainers.megatron.model.pairs import HeldPair
from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.core.config.trainer import Lora
from millrace.core.families.architecture import architecture


def pairs_of(model: RankModel) -> tuple[dict[str, HeldPair], float]:
    """This rank's pairs by the names of their matrices, and the factor of what they add; none of a model without adapters."""
    if not model.adapted:
        return {}, 1.0
    return {
        pair.matrix.name: pair for stage in model.stages for pair in stage.adapters
    }, model.last.adapters.scale


def whole_pair(pair: HeldPair) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank], from the parts of all tensor parallel ranks of the matrix."""
    return _whole_pairs([pair])[pair.matrix.name]


def _pair(pair: HeldPair, joined: Tensor) -> tuple[Tensor, Tensor]:
    """A and B. joined: the half that ranks have parts of, whole."""
    a, b = (pair.a, joined) if pair.by_rows else (joined, pair.b)
    return a, b.flatten(0, 1) if pair.halves else b


def write_adapters(model: RankModel, hf: dict[str, Any], lora: Lora, base: str, folder: Path) -> None:
    """Write a PEFT folder on rank 0. base: the folder of the model that the adapters belong to."""
    pairs = gathered(model)
    if pairs is not None:
        write_peft(folder, pairs.on_host(), lora, architecture(hf), base)


def gathered(model: RankModel) -> FlatPairs | None:
    """All pairs of the model on rank 0, on its device; elsewhere None."""
    every = pairs_of(model)[0].values()
    found = [
        _of_stage([pair for pair in every if not pair.matrix.of_experts]),
        _of_experts([pair for pair in every if pair.matrix.of_experts]),
    ]
    parts = [flat for flat in found if flat is not None]
    if mpu.get_data_parallel_rank(with_context_parallel=True) or mpu.get_tensor_model_parallel_rank():
        return None
    # only rank 0's pipeline is left
    return _joined(_together(parts), mpu.get_pipeline_model_parallel_group())


def _of_stage(pairs: Sequence[HeldPair]) -> FlatPairs | None:
    """The pairs of linear layers of this rank's stages, on the first rank that has these stages."""
    if not pairs or mpu.get_data_parallel_rank(with_context_parallel=True):
        return None
    whole = _whole_pairs(pairs)
    return None if mpu.get_tensor_model_parallel_rank() else FlatPairs.of(whole)


def _of_experts(pairs: Sequence[HeldPair]) -> FlatPairs | None:
    """The same of experts, which expert parallel ranks have parts of."""
    if not pairs or mpu.get_expert_data_parallel_rank():
        return None
    whole = _whole_pairs(pairs)
    if mpu.get_expert_tensor_parallel_rank():
        return None
    return _joined(FlatPairs.of(whole), mpu.get_expert_model_parallel_group())


def _together(parts: Sequence[FlatPairs]) -> FlatPairs:
    return FlatPairs(
        [each for part in parts for each in part.tensors], torch.cat([part.values for part in parts])
    )


def _joined(own: FlatPairs, group: Any) -> FlatPairs | None:
    """The pairs of all ranks of a group, on its first; elsewhere None."""
    if group.size() == 1:
        return own
    ranks = dist.get_process_group_ranks(group)
    first = dist.get_rank() == ranks[0]
    of_ranks: list[Any] = [None] * group.size()
    dist.gather_object(own.tensors, of_ranks if first else None, group=group, dst=ranks[0])
    if not first:
        dist.send(own.values, ranks[0], group=group)
        return None
    parts = [own]
    for rank, tensors in zip(ranks[1:], of_ranks[1:], strict=True):
        values = own.values.new_empty(sum(math.prod(shape) for _, shape in tensors))
        dist.recv(values, rank, group=group)
        parts.append(FlatPairs(tensors, values))
    return _together(parts)


def _whole_pairs(pairs: Sequence[HeldPair]) -> dict[str, tuple[Tensor, Tensor]]:
    """`whole_pair` of many, of experts or of none, for which ranks meet once."""
    cut = [pair.b if pair.by_rows else pair.a for pair in pairs]
    of_experts = pairs[0].matrix.of_experts
    group = mpu.get_expert_tensor_parallel_group() if of_experts else mpu.get_tensor_model_parallel_group()
    if group.size() == 1:
        return {pair.matrix.name: _pair(pair, part) for pair, part in zip(pairs, cut, strict=True)}
    own = torch.cat([part.reshape(-1) for part in cut])
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own, group=group)
    split = [flat.split([part.numel() for part in cut]) for flat in of_ranks]
    whole = {}
    for pair, part, *parts in zip(pairs, cut, *split, strict=True):
        joined = torch.cat([each.view(part.shape) for each in parts], pair.axis)
        whole[pair.matrix.name] = _pair(pair, joined)
    return whole
