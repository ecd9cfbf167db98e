"""Frees the memory of a tensor between the forward pass that made it and the backward pass that reads it.

Autograd's graph does not change: only the tensor's storage is freed, and later filled with the same bits. megatron has this too,
but only with Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def drop(tensor: Tensor, recompute: Callable[[], Tensor], before: Tensor) -> None:
    """Free `tensor`, which the rest of the forward pass must not read. `recompute` computes its values again.

    The memory is filled again when the gradient of `before` arrives, so all readers of the tensor must come before `before`.
    """
    if not before.requires_grad:
        return  # autograd keeps no tensors
    storage = tensor.untyped_storage()
    assert storage.nbytes() == tensor.nbytes, "the storage holds another tensor too"
    size, pending = (
        storage.nbytes(),
        [(tensor.data, recompute)],
    )  # .data: autograd does not notice writes to it
    storage.resize_(0)

    def fill(_: Tensor) -> None:
        dropped, make = pending.pop()  # so that the graph does not hold both until the backward pass ends
        with torch.no_grad():
            values = make()
            dropped.untyped_storage().resize_(size)
            dropped.copy_(values)

    before.register_hook(fill)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without first rounding the product to the factors' dtype."""
    if not right.numel():
        return  # an expert without tokens
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


def accumulate(layer_input: Tensor, grad_output: Tensor, total: Tensor) -> None:
    """Add a linear layer's weight gradient to `total`. Has the signature of Apex's function."""
    add_product(total, grad_output.t(), layer_input)
