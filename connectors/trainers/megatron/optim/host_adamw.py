"""AdamW on the host for a fraction of megatron-core's parameters, whose fp32 copies and moments are not in GPU memory.

    host = HostAdamW(optimizer, fraction=1.0, threads=None)
    ...                                 # backward passes, prepare_grads, the gradient's norm
    host.norm = norm
    optimizer.step_with_ready_grads()   # also steps what the host holds

The fp32 copies stay the parameters of the optimizer's groups, on another device, so checkpoints and schedules see no difference.
megatron-core's own optimizer for this keeps clones of them beside the originals, which a load of a state does not reach.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from millrace.connectors.trainers import patches
from millrace.connectors.trainers.host_adamw import CHUNK, ChunkSlice, HostSteps, chunks_of, first_of
from millrace.connectors.trainers.megatron.optim.fused_adamw import Shard, shards_of
from millrace.connectors.trainers.megatron.optim.parameter_state import fill_state
from millrace.connectors.trainers.megatron.optim.step_numbers import parts_of


@dataclass
class HostPart:
    """What the host steps of one optimizer."""

    part: Any
    shards: list[Shard]
    chunks: list[list[ChunkSlice]]


class HostAdamW(HostSteps):
    """Steps an optimizer's first parameters on the CPU, until they are a `fraction` of this rank's elements."""

    def __init__(self, optimizer: Any, fraction: float, threads: int | None, chunk: int = CHUNK) -> None:
        """threads: see HostSteps. chunk: elements stepped at once.

        Every rank must call it. Raises TrainerMemoryError if the host has no memory for the state.
        """
        shards = [(part, list(shards_of(part))) for part in parts_of(optimizer) if part.optimizer is not None]
        every = [shard for _, own in shards for shard in own]
        chosen = first_of(every, fraction)
        elements = sum(shard.main.numel() for shard in chosen)
        super().__init__(elements, threads, on_gpu=any(shard.target.is_cuda for shard in every))
        with self.many_threads():
            for shard in chosen:
                shard.main.data = torch.empty_like(shard.main, device="cpu").copy_(shard.main.detach())
        held = {id(shard) for shard in chosen}
        self.parts = [self._take_over(part, own, held, chunk) for part, own in shards]
        self._allocate([chunk for each in self.parts for chunk in each.chunks])

    def _take_over(self, part: Any, shards: list[Shard], held: set[int], chunk: int) -> HostPart:
        """Let megatron's optimizer step the shards that stay on the GPU, and then this object the others."""
        here = [shard for shard in shards if id(shard) in held]
        kept = [shard for shard in shards if id(shard) not in held]
        groups = {each: group for group in part.optimizer.param_groups for each in group["params"]}
        own = HostPart(part, here, list(chunks_of(here, lambda shard: groups[shard.main], chunk)))
        gradients = {shard.main: shard.gradient for shard in here}

        def prepare() -> None:
            for shard in kept:
                shard.main.grad = shard.gradient.float()

        def for_norm() -> list[Tensor]:
            found = [(each, gradients.get(each, each.grad)) for each in part.get_parameters()]
            return [grad for each, grad in found if grad is not None and _counts(part, each)]

        def finish() -> None:
            if kept:
                torch._foreach_copy_([each.target for each in kept], [each.main.detach() for each in kept])
            if own.chunks:
                self._step_part(own)

        patches.step_elsewhere(part, prepare, for_norm, finish)
        return own

    def _step_part(self, own: HostPart) -> None:
        adam = own.part.optimizer
        fill_state(adam)
        self._step(own.chunks, lambda shard: adam.state[shard.main], own.part.config.clip_grad)
        for shard in own.shards:
            adam.state[shard.main]["step"] += 1


def _counts(part: Any, parameter: Tensor) -> bool:
    """Whether this rank counts a parameter in the gradient's norm, as megatron decides it."""
    group = getattr(part, "tp_group", None)
    once = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, group)
    return bool(once)
