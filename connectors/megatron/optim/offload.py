"""Optimizer state and gradients out of GPU memory and back, so that engines on the same GPU can have it.

Owns storages, not tensors: every view stays what it was. State goes to pinned host memory, which is kept for the next
time; gradients are forgotten. The weights stay, since engines take them while the rest is away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from millrace.connectors.megatron.process.memory_errors import out_of_host_memory, ran_out
from millrace.connectors.megatron.trainable_model import TrainableModel
from millrace.core.errors import TrainerMemoryError


class OptimizerOffload:
    """GPU memory of some trained models that the host can hold instead."""

    def __init__(self, models: list[TrainableModel]) -> None:
        self.models = models
        self.offloaded = False
        self._away: list[tuple[Any, int, Tensor | None]] = []  # storage, bytes, what it held
        self._hosts: list[Tensor] = []  # pinned memory, kept for the next time

    def offload(self) -> int:
        """Give the memory back, and what PyTorch keeps of memory that is free; returns bytes of the GPU that are free again.

        Raises TrainerMemoryError if the host has no room; all is then where it was.
        """
        if not torch.cuda.is_available():
            return 0
        before = torch.cuda.mem_get_info()[0]
        if not self.offloaded:
            self._leave()
        torch.cuda.ipc_collect()  # buckets that engines have let go of
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0] - before)

    def _leave(self) -> None:
        kept, dropped = self._storages()
        self._away = [(storage, storage.nbytes(), None) for storage in dropped]
        for number, storage in enumerate(kept):
            host = self._host(number, storage.nbytes())
            host.copy_(_bytes(storage), non_blocking=True)
            self._away.append((storage, storage.nbytes(), host))
        torch.cuda.synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)
        self.offloaded = True

    def reload(self) -> None:
        """Take the memory again, with what it held; gradients are zero."""
        if not self.offloaded:
            return
        for storage, size, host in self._away:
            storage.resize_(size)
            if host is not None:
                _bytes(storage).copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        self._away = []
        self.offloaded = False
        for model in self.models:
            model.zero_grad()

    def _host(self, number: int, size: int) -> Tensor:
        if number == len(self._hosts):
            self._hosts.append(_pinned(size))
        elif self._hosts[number].numel() != size:
            self._hosts[number] = _pinned(size)
        return self._hosts[number]

    def _storages(self) -> tuple[list[Any], list[Any]]:
        """Storages, each once: what is kept on the host, and what is dropped."""
        weights = {p.untyped_storage().data_ptr() for m in self.models for p in m.inner.parameters()}
        dropped = {
            storage.data_ptr(): storage
            for model in self.models
            for p in model.inner.parameters()
            if getattr(p, "main_grad", None) is not None
            for storage in [p.main_grad.untyped_storage()]
        }
        kept = {
            storage.data_ptr(): storage
            for tensor in self._state()
            for storage in [tensor.untyped_storage()]
            if tensor.is_cuda and storage.nbytes() and storage.data_ptr() not in weights
        }
        return [storage for key, storage in kept.items() if key not in dropped], list(dropped.values())

    def _state(self) -> Iterator[Tensor]:
        for model in self.models:
            for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
                adam = part.optimizer
                for group in adam.param_groups:
                    yield from group["params"]
                for state in adam.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))


def _pinned(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise TrainerMemoryError(out_of_host_memory(size, str(error))) from None


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
