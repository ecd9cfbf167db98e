"""Weights as a stream of flat buckets under Hugging Face names. Every rank gets every bucket.

Owns the cut of the stream, which tensors stay together, the broadcast of tensors that only some ranks hold (a pipeline stage, experts), and one reused
buffer: the extra memory is one bucket for any model. Knows nothing of the receivers.
"""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.connectors.trainers.megatron.weights.hf_tensors import hf_names, hf_tensors, writes
from millrace.core.contracts.weight_bucket import TensorEntry, WeightBucket
from millrace.core.families.architecture import architecture
from millrace.core.families.tensors import stacked_names

DEVICE = 6  # index of the device among the arguments of torch's rebuild_cuda_tensor
# SGLang makes one weight of both, and drops without a word the half that comes in a request without the other
JOINED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
Unit = list[tuple[str, Tensor]]
"""Tensors of one type, with their names, that one bucket holds: one tensor, or those that engines join."""


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that one rank writes, gathered by the ranks of their tensor parallel group."""

    owner: int
    gatherers: tuple[int, ...]
    experts: bool | None  # only experts' tensors, or only other tensors; None: both
    broadcast: bool  # whether the owner sends them to all ranks, since some ranks do not gather them


class BucketStream:
    """One pass over the weights. All ranks step through it together; a bucket is valid until the next one.

    The tensors of a bucket have one type. `size`: bytes of a bucket; a larger unit gets a separate, larger bucket. `share`: make a handle with which other
    processes on this GPU can open the bucket.
    """

    def __init__(self, model: RankModel, hf: dict[str, Any], size: int, *, share: bool) -> None:
        self.flat: Tensor | None = None  # the bucket's bytes
        self._model = model
        self._hf = hf
        self._size = size
        self._share = share
        self._device = next(model.parameters()).device
        self._buffer: Tensor | None = None

    def __iter__(self) -> Iterator[WeightBucket]:
        sections = _sections(self._model, self._hf)
        for section in sections:
            for entries, more in self._buckets(section):
                end = entries[-1][-1]
                self.flat = self._buffer_of(end)[:end]
                if self.flat.is_cuda:
                    torch.cuda.current_stream().synchronize()
                handle = _ipc_handle(self._buffer_of(end)) if self._share else b""
                yield WeightBucket(entries, end, not more and section is sections[-1], handle)

    def _buckets(self, section: TensorGroup) -> Iterator[tuple[list[TensorEntry], bool]]:
        """Fill the buffer with each bucket of a section in turn; yields its entries, and whether more buckets follow."""
        units: Iterator[Unit] = iter(())
        if dist.get_rank() in section.gatherers:
            units = _units(hf_tensors(self._model, self._hf, section.experts), self._hf)
        pending, more = next(units, None), True
        while more:
            entries, pending = self._fill(pending, units)
            more = pending is not None
            if section.broadcast:
                message = [(entries, more)]
                dist.broadcast_object_list(message, src=section.owner)
                entries, more = message[0]
                end = entries[-1][-1]
                dist.broadcast(self._buffer_of(end)[:end], src=section.owner)
            yield entries, more

    def _fill(self, pending: Unit | None, units: Iterator[Unit]) -> tuple[list[TensorEntry], Unit | None]:
        """Put as many units as fit, at least one, into the buffer; returns its entries and the first unit that did not fit."""
        entries: list[TensorEntry] = []
        start = 0
        while pending is not None:
            whole = start + sum(tensor.nbytes for _, tensor in pending)
            dtype = str(pending[0][1].dtype).removeprefix("torch.")
            if entries and (whole > self._size or dtype != entries[-1].dtype):
                break
            buffer = self._buffer_of(whole)
            for name, tensor in pending:
                end = start + tensor.nbytes
                buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                entries.append(TensorEntry(name, tuple(tensor.shape), dtype, start, end))
                start = end
            pending = next(units, None)
        return entries, pending

    def _buffer_of(self, needed: int) -> Tensor:
        """The buffer, with at least `needed` bytes."""
        if self._buffer is None or self._buffer.numel() < needed:
            self._buffer = torch.empty(max(self._size, needed), dtype=torch.uint8, device=self._device)
        return self._buffer


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


def _sections(model: RankModel, hf: dict[str, Any]) -> list[TensorGroup]:
    """The sections of all ranks, in which every tensor occurs once. All ranks must call it."""
    stacked = bool(stacked_names(architecture(hf)))
    of_experts = (
        mpu.get_expert_tensor_and_model_parallel_group()
        if stacked
        else mpu.get_expert_tensor_parallel_group()
    )
    groups = {True: of_experts, False: mpu.get_tensor_model_parallel_group()}
    gatherers = {experts: tuple(dist.get_process_group_ranks(group)) for experts, group in groups.items()}
    if mpu.get_pipeline_model_parallel_world_size() == mpu.get_expert_model_parallel_world_size() == 1:
        return [TensorGroup(dist.get_rank(), gatherers[False], None, broadcast=False)]
    owned = {
        experts: group
        for experts, group in gatherers.items()
        if writes(experts, stacked=stacked and experts)
        and next(hf_names(model, hf, experts), None) is not None
    }
    owned_by_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(owned_by_ranks, owned)
    return [
        TensorGroup(owner, group, experts, broadcast=True)
        for owner, parts in enumerate(owned_by_ranks)
        for experts, group in parts.items()
    ]


def _ipc_handle(buffer: Tensor) -> bytes:
    """Arguments of torch's rebuild_cuda_tensor, with the device named by its uuid."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    device = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return pickle.dumps((*arguments[:DEVICE], device, *arguments[DEVICE + 1 :]))
