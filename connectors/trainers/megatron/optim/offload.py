"""Moves optimizer state and gradients out of GPU memory and back, so that engines on the same GPU can use the memory.

Works on storages, not tensors, so that every view stays valid. Optimizer state goes to pinned host memory, which is reused the
next time; gradients are dropped. The weights stay on the GPU, since engines read them while the rest is offloaded.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from millrace.connectors.trainers.megatron.optim.step_numbers import parts_of
from millrace.connectors.trainers.memory_errors import pinned


class Offloadable(Protocol):
    """The part of a trained model that offloading needs."""

    inner: Any  # the model with the parameters
    optimizer: Any

    def zero_grad(self) -> None:
        """Set gradients to zero."""


class OptimizerOffload:
    """Offloads GPU memory of trained models to the host."""

    def __init__(self, models: Sequence[Offloadable]) -> None:
        self.models = models
        self.offloaded = False
        self._freed: list[tuple[Any, int, Tensor | None]] = []  # storage, bytes, host copy of its content
        self._hosts: list[Tensor] = []  # pinned memory, reused the next time

    def offload(self) -> int:
        """Free the memory, and PyTorch's cache; returns the bytes that became free on the GPU.

        Raises TrainerMemoryError if the host has no room; then nothing is moved.
        """
        if not torch.cuda.is_available():
            return 0
        before = torch.cuda.mem_get_info()[0]
        if not self.offloaded:
            self._move_to_host()
        torch.cuda.ipc_collect()  # buckets that engines have closed
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0] - before)

    def _move_to_host(self) -> None:
        kept, dropped = self._storages()
        self._freed = [(storage, storage.nbytes(), None) for storage in dropped]
        for number, storage in enumerate(kept):
            host = self._host(number, storage.nbytes())
            host.copy_(_bytes(storage), non_blocking=True)
            self._freed.append((storage, storage.nbytes(), host))
        torch.cuda.synchronize()
        for storage, _, _ in self._freed:
            storage.resize_(0)
        self.offloaded = True

    def reload(self) -> None:
        """Allocate the memory again and restore the optimizer state. Gradients become zero."""
        if not self.offloaded:
            return
        for storage, size, host in self._freed:
            storage.resize_(size)
            if host is not None:
                _bytes(storage).copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        self._freed = []
        self.offloaded = False
        for model in self.models:
            model.zero_grad()

    def _host(self, number: int, size: int) -> Tensor:
        if number == len(self._hosts):
            self._hosts.append(pinned(size))
        elif self._hosts[number].numel() != size:
            self._hosts[number] = pinned(size)
        return self._hosts[number]

    def _storages(self) -> tuple[list[Any], list[Any]]:
        """The storages to move to the host, and the storages to drop, without duplicates."""
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
            for tensor in self._optimizer_tensors()
            for storage in [tensor.untyped_storage()]
            if tensor.is_cuda and storage.nbytes() and storage.data_ptr() not in weights
        }
        return [storage for key, storage in kept.items() if key not in dropped], list(dropped.values())

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for model in self.models:
            for part in parts_of(model.optimizer):
                adam = part.optimizer
                for group in adam.param_groups:
                    yield from group["params"]
                for state in adam.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
