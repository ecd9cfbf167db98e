"""The sum of a layer's output and a product of two narrow matrices, as adapters have it."""

from typing import Any

import torch
from torch import Tensor


def add_product(out: Tensor, narrow: Tensor, rows: Tensor, scale: float) -> Tensor:
    """out [..., W] += scale * narrow [T, r] @ rows [W, r].T, in place: out-of-place, a layer's output would be moved four times.

    rows are cast to the type of narrow.
    """
    added: Tensor = _AddProduct.apply(out, narrow, rows, scale)
    return added


class _AddProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, narrow: Tensor, rows: Tensor, scale: float) -> Tensor:
        rows = rows.to(narrow.dtype)
        ctx.save_for_backward(narrow, rows)
        ctx.scale = scale
        ctx.mark_dirty(out)
        out.view(-1, out.shape[-1]).addmm_(narrow, rows.t(), alpha=scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        narrow, rows = ctx.saved_tensors
        (grad,) = grads
        flat = grad.flatten(0, -2)
        return grad, (flat @ rows).mul_(ctx.scale), (flat.t() @ narrow).mul_(ctx.scale), None
