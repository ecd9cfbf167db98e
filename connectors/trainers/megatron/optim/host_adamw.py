"""AdamW on the host: it steps a fraction of the parameters, whose fp32 copies and moments are not in GPU memory.

    host = HostAdamW(optimizer, fraction=1.0, threads=None)
    ...                                 # backward passes, prepare_grads, the gradient's norm
    host.norm = norm
    optimizer.step_with_ready_grads()   # also steps what the host holds

Weights and gradients stay on the GPU. A step goes chunk by chunk: while threads step one chunk, the gradients of the next come
to the host, and the weights of the one before go back. It starts when the norm is known, so a refused step has changed nothing.
Gradients could leave before that, while the backward pass continues, but it would save little: AdamW moves seven times their
bytes through the host's memory.

The fp32 copies stay the parameters of the optimizer's groups, on another device, so checkpoints and schedules see no difference.
megatron-core's own optimizer for this keeps clones of them beside the originals, which a load of a state does not reach.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.optim.adam import adam

from millrace.connectors.trainers import patches
from millrace.connectors.trainers.checkpoint.folders import on_every_rank
from millrace.connectors.trainers.megatron.optim.fused_adamw import Shard, shards_of
from millrace.connectors.trainers.megatron.optim.parameter_state import fill_state
from millrace.connectors.trainers.megatron.optim.step_numbers import parts_of
from millrace.connectors.trainers.memory_errors import check_room_to_offload, pinned

CHUNK = 2**24  # elements: 64 MiB of gradients
SLOTS = 2  # chunks between GPU and host at once


@dataclass(frozen=True)
class ChunkSlice:
    """Elements `own` of a shard, which are elements `at` of their chunk. group: the shard's, of Adam."""

    shard: Shard
    group: dict[str, Any]
    own: slice
    at: slice


@dataclass
class HostPart:
    """What the host steps of one optimizer."""

    part: Any
    shards: list[Shard]
    chunks: list[list[ChunkSlice]]


class _Slot:
    """Pinned memory for one chunk's gradients and weights, and the events after its copies. Plain memory without a GPU."""

    def __init__(self, elements: int, *, on_gpu: bool) -> None:
        self.gradients, self.weights = (_floats(elements, on_gpu=on_gpu) for _ in range(2))
        self.fetched = torch.cuda.Event() if on_gpu else None
        self.returned = torch.cuda.Event() if on_gpu else None


class HostAdamW:
    """Steps an optimizer's first parameters on the CPU, until they are a `fraction` of this rank's elements."""

    def __init__(self, optimizer: Any, fraction: float, threads: int | None, chunk: int = CHUNK) -> None:
        """threads: without a number this rank's share of the node's cores, beside a GPU. chunk: elements stepped at once.

        Every rank must call it. Raises TrainerMemoryError if the host has no memory for the state.
        """
        self.norm = 0.0  # of the gradient before clipping; set before each step
        shards = [(part, list(shards_of(part))) for part in parts_of(optimizer) if part.optimizer is not None]
        every = [shard for _, own in shards for shard in own]
        chosen = _first(every, fraction)
        self.elements = sum(shard.main.numel() for shard in chosen)
        self._on_gpu = any(shard.target.is_cuda for shard in every)
        here = on_every_rank(platform.node).count(platform.node())
        on_every_rank(lambda: check_room_to_offload(self.elements, here))  # before any rank allocates
        self._threads = threads or max(1, (os.cpu_count() or 1) // here)
        with self._many_threads():
            for shard in chosen:
                shard.main.data = torch.empty_like(shard.main, device="cpu").copy_(shard.main.detach())
        held = {id(shard) for shard in chosen}
        self.parts = [self._take_over(part, own, held, chunk) for part, own in shards]
        size = max((chunk[-1].at.stop for each in self.parts for chunk in each.chunks), default=0)
        self._slots = [_Slot(size, on_gpu=self._on_gpu) for _ in range(SLOTS)]
        if self._on_gpu:
            self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()
            torch.cuda.empty_cache()

    def _take_over(self, part: Any, shards: list[Shard], held: set[int], chunk: int) -> HostPart:
        """Let megatron's optimizer step the shards that stay on the GPU, and then this object the others."""
        here = [shard for shard in shards if id(shard) in held]
        kept = [shard for shard in shards if id(shard) not in held]
        own = HostPart(part, here, list(_chunks(part.optimizer, here, chunk)))
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
            self._step(own)

        patches.step_elsewhere(part, prepare, for_norm, finish)
        return own

    @torch.no_grad()
    def _step(self, own: HostPart) -> None:
        """One AdamW step of what the host holds. When it returns, the weights are on their way to the GPU."""
        if not own.chunks:
            return
        with self._many_threads():
            fill_state(own.part.optimizer)
            if self._on_gpu:
                self._out.wait_stream(torch.cuda.current_stream())
                self._back.wait_stream(torch.cuda.current_stream())
            self._fetch(own.chunks[0], self._slots[0])
            for number, chunk in enumerate(own.chunks):
                slot = self._slots[number % SLOTS]
                if number + 1 < len(own.chunks):
                    self._fetch(own.chunks[number + 1], self._slots[(number + 1) % SLOTS])
                self._adam(own.part, chunk, slot)
                self._return(chunk, slot)
            if self._on_gpu:
                torch.cuda.current_stream().wait_stream(self._back)
        for shard in own.shards:
            own.part.optimizer.state[shard.main]["step"] += 1

    def _fetch(self, chunk: list[ChunkSlice], slot: _Slot) -> None:
        """Start to copy a chunk's gradients to the host."""
        with torch.cuda.stream(self._out) if self._on_gpu else nullcontext():
            for each in chunk:
                slot.gradients[each.at].copy_(each.shard.gradient[each.own], non_blocking=True)
            if slot.fetched is not None:
                slot.fetched.record()

    def _adam(self, part: Any, chunk: list[ChunkSlice], slot: _Slot) -> None:
        """Step a chunk, once its gradients are there, with gradients clipped by their norm.

        Beside a GPU it is the fused kernel, which divides gradients as it reads them, as on the GPU. Without one it is the
        arithmetic of the other parameters.
        """
        clip, scale = part.config.clip_grad, None
        clips = clip > 0 and clip / (self.norm + 1e-6) < 1
        if slot.fetched is not None:
            slot.fetched.synchronize()
            scale = torch.full((), (self.norm + 1e-6) / clip) if clips else None
        elif clips:
            slot.gradients[: chunk[-1].at.stop].mul_(clip / (self.norm + 1e-6))
        for _, members in groupby(chunk, key=lambda each: id(each.group)):
            slices = list(members)
            group = slices[0].group
            states = [part.optimizer.state[each.shard.main] for each in slices]
            adam(
                [each.shard.main.detach()[each.own] for each in slices],
                [slot.gradients[each.at] for each in slices],
                [state["exp_avg"][each.own] for state, each in zip(states, slices, strict=True)],
                [state["exp_avg_sq"][each.own] for state, each in zip(states, slices, strict=True)],
                [],
                # all chunks of a shard are of one step, and the kernel counts up
                [state["step"].clone() for state in states],
                foreach=False,
                fused=self._on_gpu,
                grad_scale=scale,
                decoupled_weight_decay=group["decoupled_weight_decay"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _return(self, chunk: list[ChunkSlice], slot: _Slot) -> None:
        """Start to copy a chunk's weights to the model, in its type."""
        if slot.returned is not None:
            slot.returned.synchronize()  # of the chunk that had the slot before
        with torch.cuda.stream(self._back) if self._on_gpu else nullcontext():
            for each in chunk:
                weights, target = each.shard.main.detach()[each.own], each.shard.target[each.own]
                if self._on_gpu:
                    # PyTorch would convert in memory that is not pinned, and wait
                    weights = slot.weights[each.at].view(target.dtype)[: len(target)].copy_(weights)
                target.copy_(weights, non_blocking=True)
            if slot.returned is not None:
                slot.returned.record()

    @contextmanager
    def _many_threads(self) -> Iterator[None]:
        """Beside a GPU a rank has one thread otherwise."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads if self._on_gpu else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _first(shards: Sequence[Shard], fraction: float) -> list[Shard]:
    """The first shards that together have a fraction of all elements, or a little more."""
    wanted, taken, chosen = fraction * sum(shard.main.numel() for shard in shards), 0, []
    for shard in shards:
        if taken >= wanted:
            break
        chosen.append(shard)
        taken += shard.main.numel()
    return chosen


def _chunks(optimizer: Any, shards: Sequence[Shard], size: int) -> Iterator[list[ChunkSlice]]:
    """The elements of all shards in order, `size` at a time."""
    groups = {each: group for group in optimizer.param_groups for each in group["params"]}
    chunk: list[ChunkSlice] = []
    at = 0
    for shard in shards:
        start, end = 0, shard.main.numel()
        while start < end:
            count = min(end - start, size - at)
            own, place = slice(start, start + count), slice(at, at + count)
            chunk.append(ChunkSlice(shard, groups[shard.main], own, place))
            start, at = start + count, at + count
            if at == size:
                yield chunk
                chunk, at = [], 0
    if chunk:
        yield chunk


def _counts(part: Any, parameter: Tensor) -> bool:
    """Whether this rank counts a parameter in the gradient's norm, as megatron decides it."""
    group = getattr(part, "tp_group", None)
    once = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, group)
    return bool(once)


def _floats(count: int, *, on_gpu: bool) -> Tensor:
    return pinned(4 * count).view(torch.float32) if on_gpu else torch.empty(count)
