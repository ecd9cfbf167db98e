"""Trainer rank 0 of a broadcast by gloo, in a test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from millrace.connectors.trainers.weights.engine_group import EngineGroup
from millrace.core.contracts.handles import BroadcastGroup
from millrace.core.contracts.weight_bucket import TensorEntry, WeightBucket
from tests.support.asked_here import AskedHere

BUCKETS = 3


class Sending(AskedHere):
    """Trainer rank 0 with the weights of a folder: fills buckets and, asked as a BroadcastSource, sends them from a thread."""

    def __init__(self, model: Path) -> None:
        self.tensors = sorted(load_file(model / "model.safetensors").items())
        self.engines: EngineGroup | None = None
        self.groups: list[str] = []
        self.disturb: Callable[[int], None] = lambda number: None  # called when a bucket was filled
        self._flat = torch.empty(0, dtype=torch.uint8)

    async def stream(self) -> AsyncIterator[Sequence[WeightBucket]]:
        for number in range(BUCKETS):
            part, entries, at = self.tensors[number::BUCKETS], [], 0
            for name, tensor in part:
                entries.append(TensorEntry(name, tuple(tensor.shape), "float32", at, at + tensor.nbytes))
                at += tensor.nbytes
            self._flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in part])
            self.disturb(number)
            yield [WeightBucket(entries, at, number == BUCKETS - 1, b"")]

    def broadcast_group(self) -> BroadcastGroup | None:
        return self.engines.description if self.engines else None

    def open_broadcast(self, name: str, members: list[str], loopback: bool) -> BroadcastGroup:
        self.close_broadcast()
        self.engines = EngineGroup(name, members, loopback=loopback, gpu=False)
        self.groups.append(name)
        return self.engines.description

    async def enter_broadcast(self, size: int) -> None:
        assert self.engines is not None
        await asyncio.to_thread(self.engines.enter, size)

    async def broadcast_bucket(self, timeout_s: float) -> None:
        assert self.engines is not None
        await asyncio.to_thread(self.engines.send, self._flat, timeout_s)

    def close_broadcast(self) -> None:
        if self.engines:
            self.engines.close()
        self.engines = None
