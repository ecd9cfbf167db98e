"""The optimizer step on a GPU in few passes over memory: gradient norm, AdamW with clipping, and the copy of the weights.

Without Transformer Engine or Apex, megatron's own step reads one number from the device per parameter and makes a dozen
passes. Owns no state: the optimizer and its checkpoints stay megatron's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from millrace.connectors.trainers import patches
from millrace.connectors.trainers.megatron.optim.step_numbers import parts_of


@dataclass(frozen=True)
class Shard:
    """What a rank steps of one parameter, all flat: its fp32 copy, its gradient, and where its weights go in the model's buffer."""

    main: Tensor
    gradient: Tensor
    target: Tensor


def shards_of(part: Any) -> Iterator[Shard]:
    """The shards of a distributed optimizer's part."""
    groups = [
        *zip(part.shard_fp32_from_float16_groups, part.model_float16_groups, strict=True),
        *zip(part.shard_fp32_groups, part.model_fp32_groups, strict=True),
    ]
    for main_parameters, model_parameters in groups:
        for main, model in zip(main_parameters, model_parameters, strict=True):
            spans = part._get_model_param_range_map(model)
            own, in_bucket = spans["param"], spans["gbuf_world_in_bucket"]
            number, _, bucket = part.model_param_gbuf_map[model]
            flat = part.buffers[number].buckets[bucket].param_data.view(-1)
            gradient = model.main_grad.view(-1)[own.start : own.end]
            yield Shard(main, gradient, flat[in_bucket.start : in_bucket.end])


def _parts(optimizer: Any) -> list[Any]:
    return [part for part in parts_of(optimizer) if part.optimizer is not None]


def _fusable(part: Any) -> bool:
    """Whether this is torch's AdamW, and its parameters are on a GPU, without what the host steps."""
    on_gpu = [parameter.is_cuda for parameter in _parameters(part)]
    return isinstance(part.optimizer, torch.optim.AdamW) and (any(on_gpu) or not on_gpu)


def _parameters(part: Any) -> list[Tensor]:
    """A part's parameters. A pipeline rank without experts has none in the part of experts."""
    return [parameter for group in part.optimizer.param_groups for parameter in group["params"]]


def applies(optimizer: Any) -> bool:
    """Whether `gradient_norm` and `step` may replace the optimizer's own."""
    parts = _parts(optimizer)
    return any(map(_parameters, parts)) and all(map(_fusable, parts))


def install(optimizer: Any) -> None:
    """Make AdamW one kernel, if possible. Call it again after loading a state."""
    for part in _parts(optimizer):
        if not _parameters(part) or not _fusable(part):
            continue
        adam = part.optimizer
        for group in adam.param_groups:
            group |= {"fused": True, "foreach": False}
            for parameter in group["params"]:
                state = adam.state.get(parameter, {})
                if "step" in state:
                    state["step"] = state["step"].to(parameter.device)


def install_weight_copy(optimizer: Any) -> None:
    """Make the copy of the weights one kernel, if possible."""
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer) and _parameters(part) and _fusable(part):
            patches.replace_weight_copy(part, _weight_copy(part))


def _weight_copy(part: Any) -> Callable[[], None]:
    """A function that writes this rank's fp32 parameters to the buffer from which the model's are gathered."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def copy() -> None:
        if not pairs:
            pairs.extend((shard.target, shard.main.detach()) for shard in shards_of(part))
        torch._foreach_copy_([target for target, _ in pairs], [main for _, main in pairs])

    return copy


@torch.no_grad()
def gradient_norm(optimizer: Any) -> Tensor:
    """Norm over all ranks, as megatron computes it: shared and replicated parameters count once. Call it after `prepare_grads`.

    The result stays on the device, so the host does not wait.
    """
    total: Tensor | None = None
    for part in _parts(optimizer):
        grads = part.get_main_grads_for_grad_norm()
        square = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
        if grads:
            square = torch.stack(torch._foreach_norm(grads)).square().sum()
        if dist.get_world_size(part.get_grad_stats_parallel_group()) > 1:
            dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        total = square if total is None else total + square
    assert total is not None
    return total.sqrt()


@torch.no_grad()
def step(optimizer: Any, norm: float) -> None:
    """One AdamW step on gradients clipped by their `norm`. The kernel divides gradients while it reads them."""
    for part in _parts(optimizer):
        adam, clip = part.optimizer, part.config.clip_grad
        divisor = (norm + 1e-6) / clip if clip > 0 else 0.0
        patches.set_gradient_divisor(adam, torch.full((), divisor, device="cuda") if divisor > 1 else None)
    assert optimizer.step_with_ready_grads(), "the optimizer skipped a step with finite gradients"
