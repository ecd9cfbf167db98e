"""Weight gradients of linear layers, summed in fp32 by the matrix product itself.

megatron does this with an extension of Apex; here it is done with PyTorch's own products.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
