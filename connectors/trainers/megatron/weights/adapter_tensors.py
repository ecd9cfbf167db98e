"""Whole adapters, gathered over the ranks that hold parts of them, and written as a PEFT folder.

Owns which rank writes: rank 0, since adapters are small. All ranks must call each function together.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from millrace.connectors.trainers.adapters import FlatPairs, write_peft
from millrace.connectors.trainers.megatron.model.adapters import Pair
from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.core.config.trainer import Lora
from millrace.core.families.architecture import architecture


def pairs_of(model: RankModel) -> tuple[dict[str, Pair], float]:
    """This rank's pairs by the names of their matrices, and the factor of what they add; none of a model without adapters."""
    if not model.adapted:
        return {}, 1.0
    return {
        pair.matrix.name: pair for stage in model.stages for pair in stage.adapters
    }, model.last.adapters.scale


def whole_pair(pair: Pair) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank], from the parts of all tensor parallel ranks."""
    return _whole_pairs({pair.matrix.name: pair})[pair.matrix.name]


def _pair(pair: Pair, joined: Tensor) -> tuple[Tensor, Tensor]:
    """A and B. joined: the half that ranks have parts of, whole."""
    a, b = (pair.A.detach(), joined) if pair.by_rows else (joined, pair.B.detach())
    return a, b.flatten(0, 1) if pair.halves else b


def write_adapters(model: RankModel, hf: dict[str, Any], lora: Lora, base: str, folder: Path) -> None:
    """Write a PEFT folder on rank 0. base: the folder of the model that the adapters belong to."""
    pairs = gathered(model)
    if pairs is not None:
        write_peft(folder, pairs.on_host(), lora, architecture(hf), base)


def gathered(model: RankModel) -> FlatPairs | None:
    """All pairs of the model on rank 0, on its device; elsewhere None."""
    if mpu.get_data_parallel_rank(with_context_parallel=True):
        return None
    whole = _whole_pairs(pairs_of(model)[0])
    if mpu.get_tensor_model_parallel_rank():
        return None
    own = FlatPairs.of(whole)
    # only rank 0's pipeline is left
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return own
    first = dist.get_rank() == 0
    of_stages: list[Any] = [None] * group.size()
    dist.gather_object(own.tensors, of_stages if first else None, group=group, dst=0)
    if not first:
        dist.send(own.values, 0, group=group)
        return None
    values = [own.values]
    for rank, tensors in zip(dist.get_process_group_ranks(group)[1:], of_stages[1:], strict=True):
        values.append(own.values.new_empty(sum(math.prod(shape) for _, shape in tensors)))
        dist.recv(values[-1], rank, group=group)
    return FlatPairs([each for tensors in of_stages for each in tensors], torch.cat(values))


def _whole_pairs(pairs: Mapping[str, Pair]) -> dict[str, tuple[Tensor, Tensor]]:
    """`whole_pair` of many, for which ranks meet once."""
    cut = [(pair.B if pair.by_rows else pair.A).detach() for pair in pairs.values()]
    group = mpu.get_tensor_model_parallel_group()
    if group.size() == 1:
        return {name: _pair(pair, part) for (name, pair), part in zip(pairs.items(), cut, strict=True)}
    own = torch.cat([part.reshape(-1) for part in cut])
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own, group=group)
    split = [flat.split([part.numel() for part in cut]) for flat in of_ranks]
    whole = {}
    for (name, pair), part, *parts in zip(pairs.items(), cut, *split, strict=True):
        joined = torch.cat([each.view_as(part) for each in parts], pair.axis)
        whole[name] = _pair(pair, joined)
    return whole
