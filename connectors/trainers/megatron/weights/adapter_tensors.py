"""Whole adapters, gathered over the ranks that hold parts of them, and written as a PEFT folder.

Owns which rank writes: rank 0, since adapters are small. All ranks must call each function together.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from millrace.connectors.trainers.adapters import write_peft
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
    a, b = pair.A.detach(), pair.B.detach()
    group = mpu.get_tensor_model_parallel_group()
    if group.size() > 1:
        own = (b if pair.by_rows else a).contiguous()
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        joined = torch.cat(parts, pair.axis)
        a, b = (a, joined) if pair.by_rows else (joined, b)
    return a, b.flatten(0, 1) if pair.halves else b


def write_adapters(model: RankModel, hf: dict[str, Any], lora: Lora, base: str, folder: Path) -> None:
    """Write a PEFT folder on rank 0. base: the folder of the model that the adapters belong to."""
    pairs = _gathered(model)
    if dist.get_rank() == 0:
        write_peft(folder, pairs, lora, architecture(hf), base)


def _gathered(model: RankModel) -> dict[str, tuple[Tensor, Tensor]]:
    """All pairs of the model on rank 0, on the host; elsewhere none."""
    own = {name: tuple(part.cpu() for part in whole_pair(pair)) for name, pair in pairs_of(model)[0].items()}
    writes = (
        mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    )
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own if writes else {}, of_ranks if dist.get_rank() == 0 else None)
    return {name: pair for part in of_ranks if part for name, pair in part.items()}
