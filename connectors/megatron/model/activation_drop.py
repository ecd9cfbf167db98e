"""Tensors whose memory is free between the forward pass that made them and the backward pass that reads them.

Autograd's graph stays as it is: only a tensor's storage goes and comes back, with the same bits. megatron's own way of it
needs Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def drop(tensor: Tensor, again: Callable[[], Tensor], before: Tensor) -> None:
    """Free `tensor`, which the rest of the forward pass may not read; `again` makes its values anew.

    Its memory is filled when the gradient of `before` is there: whatever reads it must lie on the way to `before`.
    """
    if not before.requires_grad:
        return  # nothing was kept
    storage = tensor.untyped_storage()
    assert storage.nbytes() == tensor.nbytes, "another tensor would go with it"
    size, waiting = storage.nbytes(), [(tensor.data, again)]  # writing to .data is no change
    storage.resize_(0)

    def fill(_: Tensor) -> None:
        kept, make = waiting.pop()  # else the graph would hold both until the whole backward pass is done
        with torch.no_grad():
            made = make()
            kept.untyped_storage().resize_(size)
            kept.copy_(made)

    before.register_hook(fill)
