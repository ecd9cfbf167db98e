"""Weights as a stream of flat buckets under Hugging Face names, of which every rank gets every one.

Owns cutting the stream, carrying to all ranks what only some hold (a pipeline stage, experts) and one reused buffer: the
extra memory is one bucket, whatever the model. Knows nothing of who takes them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from millrace.connectors.megatron.model.policy_model import PolicyModel
from millrace.connectors.megatron.weights.hf_files import hf_names, hf_tensors, writes
from millrace.core.contracts.weight_bucket import Bucket, Entry

DEVICE = 6  # which of the arguments of torch's rebuild_cuda_tensor names the device


@dataclass(frozen=True)
class Turn:
    """Tensors that one rank writes, gathered together by the ranks of its tensor parallel group."""

    owner: int
    gatherers: tuple[int, ...]
    experts: bool | None  # experts' alone, or the others' alone; None: both
    carried: bool  # whether the owner sends them on to all ranks, since some do not gather them


class BucketStream:
    """One pass over the weights. All ranks step through it together; a bucket is valid until the next is asked for.

    `size`: bytes of a bucket; one tensor that is larger makes a larger bucket of its own. `share`: for other processes on
    this GPU.
    """

    def __init__(
        self, model: PolicyModel, hf: dict[str, Any], dtype: torch.dtype, size: int, *, share: bool
    ) -> None:
        self.flat: Tensor | None = None  # the bucket's bytes
        self._model = model
        self._hf = hf
        self._dtype = dtype
        self._size = size
        self._share = share
        self._device = next(model.parameters()).device
        self._buffer: Tensor | None = None

    def __iter__(self) -> Iterator[Bucket]:
        turns = _turns(self._model, self._hf)
        for turn in turns:
            for entries, more in self._buckets(turn):
                end = entries[-1][-1]
                self.flat = self._room(end)[:end]
                if self.flat.is_cuda:
                    torch.cuda.current_stream().synchronize()
                handle = _shared(self._room(end)) if self._share else b""
                yield Bucket(entries, end, not more and turn is turns[-1], handle)

    def _buckets(self, turn: Turn) -> Iterator[tuple[list[Entry], bool]]:
        """Fill the buffer with one bucket of a turn after the other: what lies in it, and whether more comes."""
        tensors: Iterator[tuple[str, Tensor]] = iter(())
        if dist.get_rank() in turn.gatherers:
            tensors = hf_tensors(self._model, self._hf, turn.experts)
        waiting, more = next(tensors, None), True
        while more:
            entries, waiting = self._fill(waiting, tensors)
            more = waiting is not None
            if turn.carried:
                told = [(entries, more)]
                dist.broadcast_object_list(told, src=turn.owner)
                entries, more = told[0]
                end = entries[-1][-1]
                dist.broadcast(self._room(end)[:end], src=turn.owner)
            yield entries, more

    def _fill(
        self, waiting: tuple[str, Tensor] | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> tuple[list[Entry], tuple[str, Tensor] | None]:
        """As many tensors as fit, at least one, and the one that did not."""
        entries: list[Entry] = []
        start = 0
        while waiting is not None:
            name, tensor = waiting
            end = start + tensor.numel() * self._dtype.itemsize
            if entries and end > self._size:
                break
            self._room(end)[start:end].view(self._dtype).view(tensor.shape).copy_(tensor)
            dtype = str(self._dtype).removeprefix("torch.")
            entries.append((name, tuple(tensor.shape), dtype, start, end))
            start, waiting = end, next(tensors, None)
        return entries, waiting

    def _room(self, needed: int) -> Tensor:
        """The buffer; a tensor larger than a bucket gets a larger one."""
        if self._buffer is None or self._buffer.numel() < needed:
            self._buffer = torch.empty(max(self._size, needed), dtype=torch.uint8, device=self._device)
        return self._buffer


def _turns(model: PolicyModel, hf: dict[str, Any]) -> list[Turn]:
    """Who writes what, so that every tensor comes once. All ranks must call it."""
    gatherers = tuple(dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group()))
    if mpu.get_pipeline_model_parallel_world_size() == mpu.get_expert_model_parallel_world_size() == 1:
        return [Turn(dist.get_rank(), gatherers, None, carried=False)]
    mine = {
        experts
        for experts in (True, False)
        if writes(experts) and next(hf_names(model, hf, experts), None) is not None
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, gatherers))
    return [
        Turn(owner, group, None if len(held) == 2 else held == {True}, carried=True)
        for owner, (held, group) in enumerate(everyone)
        if held
    ]


def _shared(buffer: Tensor) -> bytes:
    """Arguments of torch's rebuild_cuda_tensor, the device by its uuid."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    device = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return pickle.dumps((*arguments[:DEVICE], device, *arguments[DEVICE + 1 :]))
