"""Weights as a stream of flat buckets in GPU memory, under Hugging Face names, for processes on the same GPUs.

Owns cutting the stream and one reused buffer: the extra memory is one bucket, whatever the model. Knows nothing of who
takes them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from connectors.megatron.model import PolicyModel
from connectors.megatron.weights import hf_tensors

DEVICE = 6  # which of the arguments of torch's rebuild_cuda_tensor names the device
ALIGN = 256  # bytes


@dataclass(frozen=True)
class Bucket:
    """Whole tensors laid end to end. `entries`: name, shape, dtype, first and past-the-end byte."""

    entries: list[tuple[str, tuple[int, ...], str, int, int]]
    handle: bytes  # how another process on this GPU opens the buffer
    device: str  # the GPU's uuid
    bytes: int
    last: bool


class BucketStream:
    """One pass over the weights. All ranks step through it together; a bucket is valid until the next is asked for."""

    def __init__(self, model: PolicyModel, hf: dict[str, Any], dtype: torch.dtype, size: int) -> None:
        self._tensors = hf_tensors(model, hf)
        self._dtype = dtype
        self._size = size
        self._buffer: Tensor | None = None
        self._waiting: tuple[str, Tensor] | None = None

    def __iter__(self) -> Iterator[Bucket]:
        self._waiting = next(self._tensors, None)
        while self._waiting is not None:
            yield self._fill()

    def _fill(self) -> Bucket:
        """The next bucket: as many tensors as fit, at least one."""
        assert self._waiting is not None
        entries: list[tuple[str, tuple[int, ...], str, int, int]] = []
        at = 0
        while self._waiting is not None:
            name, tensor = self._waiting
            nbytes = tensor.numel() * self._dtype.itemsize
            start = -(-at // ALIGN) * ALIGN
            if entries and start + nbytes > self._size:
                break
            buffer = self._room(start + nbytes)
            buffer[start : start + nbytes].view(self._dtype).view(tensor.shape).copy_(tensor)
            entries.append(
                (name, tuple(tensor.shape), str(self._dtype).removeprefix("torch."), start, start + nbytes)
            )
            at = start + nbytes
            self._waiting = next(self._tensors, None)
        assert self._buffer is not None
        torch.cuda.current_stream().synchronize()
        handle, device = _shared(self._buffer)
        return Bucket(entries, handle, device, at, last=self._waiting is None)

    def _room(self, needed: int) -> Tensor:
        """The buffer; one tensor larger than a bucket gets a larger one, and is then alone in it."""
        if self._buffer is None or self._buffer.numel() < needed:
            self._buffer = torch.empty(max(self._size, needed), dtype=torch.uint8, device="cuda")
        return self._buffer


def _shared(buffer: Tensor) -> tuple[bytes, str]:
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    device = str(torch.cuda.get_device_properties(buffer.device).uuid)
    named = (*arguments[:DEVICE], device, *arguments[DEVICE + 1 :])
    return pickle.dumps(named), device
