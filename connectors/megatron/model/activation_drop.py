"""Frees the memory of a tensor between the forward pass that made it and the backward pass that reads it.

Autograd's graph stays as it is: only the tensor's storage is freed, and later filled with the same bits. megatron has this
too, but needs Transformer Engine for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def drop(tensor: Tensor, recompute: Callable[[], Tensor], before: Tensor) -> None:
    """Free `tensor`, which the rest of the forward pass must not read; `recompute` makes its values again.

    Its memory is filled when the gradient of `before` arrives: whatever reads the tensor must lie on the way to `before`.
    """
    if not before.requires_grad:
        return  # nothing was kept
    storage = tensor.untyped_storage()
    assert storage.nbytes() == tensor.nbytes, "the storage holds another tensor too"
    size, pending = (
        storage.nbytes(),
        [(tensor.data, recompute)],
    )  # .data: writing to it is no change to autograd
    storage.resize_(0)

    def fill(_: Tensor) -> None:
        dropped, make = pending.pop()  # else the graph would hold both until the whole backward pass is done
        with torch.no_grad():
            values = make()
            dropped.untyped_storage().resize_(size)
            dropped.copy_(values)

    before.register_hook(fill)
