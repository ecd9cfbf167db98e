"""AdamW on the host for a part of a rank's parameters: their fp32 weights and moments are in the host's memory.

Weights and gradients stay on the GPU. A step goes chunk by chunk: while threads step one chunk, the gradients of the next come
to the host, and the weights of the one before go back. It starts when the norm is known, so a refused step has changed nothing.
Gradients could leave before that, while the backward pass continues, but it would save little: AdamW moves seven times their
bytes through the host's memory.

Knows nothing of the optimizer whose numbers and moments it takes, nor of how parameters are cut over ranks.
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.adam import adam

from millrace.connectors.trainers.checkpoint.folders import on_every_rank
from millrace.connectors.trainers.memory_errors import check_room_to_offload, pinned

CHUNK = 2**24  # elements: 64 MiB of gradients
SLOTS = 2  # chunks between GPU and host at once


class SteppedShard(Protocol):
    """What a rank steps of one parameter, all flat: its fp32 weights, its gradient, and where its weights go on the GPU."""

    @property
    def main(self) -> Tensor:
        """The weights that are stepped."""

    @property
    def gradient(self) -> Tensor | None:
        """None: the parameter is not stepped this time."""

    @property
    def target(self) -> Tensor:
        """The model's weights."""


AnyShard = TypeVar("AnyShard", bound=SteppedShard)
StateOf = Callable[[Any], Mapping[str, Tensor]]  # of a shard: flat moments, and the number of steps


@dataclass(frozen=True)
class ChunkSlice:
    """Elements `own` of a shard, which are elements `at` of their chunk. group: the shard's, of Adam."""

    shard: SteppedShard
    group: dict[str, Any]
    own: slice
    at: slice


class _Slot:
    """Pinned memory for one chunk's gradients and weights, and the events after its copies. Plain memory without a GPU."""

    def __init__(self, elements: int, *, on_gpu: bool) -> None:
        self.gradients, self.weights = (_floats(elements, on_gpu=on_gpu) for _ in range(2))
        self.fetched = torch.cuda.Event() if on_gpu else None
        self.returned = torch.cuda.Event() if on_gpu else None


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an optimizer's group, as PyTorch's function of Adam and AdamW takes them."""
    beta1, beta2 = group["betas"]
    own = {name: group[name] for name in ("decoupled_weight_decay", "lr", "weight_decay", "eps")}
    return {**own, "beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}


class HostSteps:
    """Steps shards on the CPU."""

    def __init__(self, elements: int, threads: int | None, *, on_gpu: bool) -> None:
        """elements: of all shards. threads: without a number this rank's share of the node's cores, beside a GPU.

        Every rank must call it. Raises TrainerMemoryError if the host has no memory for the state.
        """
        self.norm = 0.0  # of the gradient before clipping; set before each step
        self.elements = elements
        self._on_gpu = on_gpu
        here = on_every_rank(platform.node).count(platform.node())
        on_every_rank(lambda: check_room_to_offload(elements, here))  # before any rank allocates
        self._threads = threads or max(1, (os.cpu_count() or 1) // here)
        self._slots: list[_Slot] = []

    def _allocate(self, chunks: Sequence[list[ChunkSlice]]) -> None:
        """Memory for the largest of all chunks."""
        size = max((chunk[-1].at.stop for chunk in chunks), default=0)
        self._slots = [_Slot(size, on_gpu=self._on_gpu) for _ in range(SLOTS)]
        if self._on_gpu:
            self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _step(self, chunks: Sequence[list[ChunkSlice]], state_of: StateOf, clip: float) -> None:
        """One AdamW step. When it returns, the weights are on their way to the GPU. clip: the largest norm; 0: any."""
        with self.many_threads():
            if self._on_gpu:
                self._out.wait_stream(torch.cuda.current_stream())
                self._back.wait_stream(torch.cuda.current_stream())
            self._fetch(chunks[0], self._slots[0])
            for number, chunk in enumerate(chunks):
                slot = self._slots[number % SLOTS]
                if number + 1 < len(chunks):
                    self._fetch(chunks[number + 1], self._slots[(number + 1) % SLOTS])
                self._adam(chunk, slot, state_of, clip)
                self._return(chunk, slot)
            if self._on_gpu:
                torch.cuda.current_stream().wait_stream(self._back)

    def _fetch(self, chunk: list[ChunkSlice], slot: _Slot) -> None:
        """Start to copy a chunk's gradients to the host."""
        with torch.cuda.stream(self._out) if self._on_gpu else nullcontext():
            for each in chunk:
                if each.shard.gradient is not None:
                    slot.gradients[each.at].copy_(each.shard.gradient[each.own], non_blocking=True)
            if slot.fetched is not None:
                slot.fetched.record()

    def _adam(self, chunk: list[ChunkSlice], slot: _Slot, state_of: StateOf, clip: float) -> None:
        """Step a chunk, once its gradients are there, with gradients clipped by their norm.

        Beside a GPU it is the fused kernel, which divides gradients as it reads them, as on the GPU. Without one it is the
        arithmetic of the other parameters.
        """
        scale = None
        clips = clip > 0 and clip / (self.norm + 1e-6) < 1
        if slot.fetched is not None:
            slot.fetched.synchronize()
            scale = torch.full((), (self.norm + 1e-6) / clip) if clips else None
        elif clips:
            slot.gradients[: chunk[-1].at.stop].mul_(clip / (self.norm + 1e-6))
        stepped = [each for each in chunk if each.shard.gradient is not None]
        for _, members in groupby(stepped, key=lambda each: id(each.group)):
            slices = list(members)
            group = slices[0].group
            states = [state_of(each.shard) for each in slices]
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
                **numbers_of(group),
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
    def many_threads(self) -> Iterator[None]:
        """A context with the host's threads. Beside a GPU a rank has one otherwise."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads if self._on_gpu else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def first_of(shards: Sequence[AnyShard], fraction: float) -> list[AnyShard]:
    """The first shards that together have a fraction of all elements, or a little more."""
    wanted, taken, chosen = fraction * sum(shard.main.numel() for shard in shards), 0, []
    for shard in shards:
        if taken >= wanted:
            break
        chosen.append(shard)
        taken += shard.main.numel()
    return chosen


def chunks_of(
    shards: Sequence[AnyShard], group_of: Callable[[AnyShard], dict[str, Any]], size: int
) -> Iterator[list[ChunkSlice]]:
    """The elements of all shards in order, `size` at a time."""
    chunk: list[ChunkSlice] = []
    at = 0
    for shard in shards:
        start, end = 0, shard.main.numel()
        while start < end:
            count = min(end - start, size - at)
            own, place = slice(start, start + count), slice(at, at + count)
            chunk.append(ChunkSlice(shard, group_of(shard), own, place))
            start, at = start + count, at + count
            if at == size:
                yield chunk
                chunk, at = [], 0
    if chunk:
        yield chunk


def _floats(count: int, *, on_gpu: bool) -> Tensor:
    return pinned(4 * count).view(torch.float32) if on_gpu else torch.empty(count)
