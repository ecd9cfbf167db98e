"""Weights as a stream of flat buckets under Hugging Face names. Every rank gets every bucket.

Owns the cut of the stream, the broadcast of tensors that only some ranks hold (a pipeline stage, experts), and one reused
buffer: the extra memory is one bucket for any model. Knows nothing of the receivers.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.core.contracts.weight_bucket import TensorEntry, WeightBucket

DEVICE = 6  # index of the device among the arguments of torch's rebuild_cuda_tensor
# SGLang makes one weight of both, and drops without a word the half that comes in a request without the other
JOINED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
Unit = list[tuple[str, Tensor]]
"""Tensors of one type, with their names, that one bucket holds: one tensor, or those that engines join."""


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that one rank writes, gathered by some ranks together."""

    owner: int
    gatherers: tuple[int, ...]
    units: Callable[[], Iterator[Unit]]  # gathers the tensors, one unit after another
    broadcast: bool  # whether the owner sends them to all ranks, since some ranks do not gather them


class BucketStream:
    """One pass over the weights. All ranks step through it together; a bucket is valid until the next one.

    The tensors of a bucket have one type. `size`: bytes of a bucket; a larger unit gets a separate, larger bucket. `share`: make a handle with which other
    processes on this GPU can open the bucket.
    """

    def __init__(self, sections: Sequence[TensorGroup], size: int, device: Any, *, share: bool) -> None:
        self.flat: Tensor | None = None  # the bucket's bytes
        self._sections = sections
        self._size = size
        self._share = share
        self._device = device
        self._buffer: Tensor | None = None

    def __iter__(self) -> Iterator[WeightBucket]:
        for section in self._sections:
            for entries, more in self._buckets(section):
                end = entries[-1][-1]
                self.flat = self._buffer_of(end)[:end]
                if self.flat.is_cuda:
                    torch.cuda.current_stream().synchronize()
                handle = _ipc_handle(self._buffer_of(end)) if self._share else b""
                yield WeightBucket(entries, end, not more and section is self._sections[-1], handle)

    def _buckets(self, section: TensorGroup) -> Iterator[tuple[list[TensorEntry], bool]]:
        """Fill the buffer with each bucket of a section in turn; yields its entries, and whether more buckets follow."""
        units: Iterator[Unit] = iter(())
        if dist.get_rank() in section.gatherers:
            units = section.units()
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


def _ipc_handle(buffer: Tensor) -> bytes:
    """Arguments of torch's rebuild_cuda_tensor, with the device named by its uuid."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    device = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return pickle.dumps((*arguments[:DEVICE], device, *arguments[DEVICE + 1 :]))
