"""Gradients of linear layers' weights, summed by the matrix product itself into the fp32 buffers that the optimizer reads.

megatron does so with an extension of Apex, which hosts without it lack: this is the same for them, in PyTorch's products.
Besides the CPU shim, the only place that sets anything in megatron.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without rounding the product to the factors' type first."""
    if not right.numel():
        return  # an expert without tokens
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


def _accumulate(given: Tensor, grad: Tensor, total: Tensor) -> None:
    add_product(total, grad.t(), given)


def install() -> bool:
    """Offer megatron what it looks for, where there is a GPU; whether it has it."""
    module: Any = layers
    if not module._grad_accum_fusion_available and torch.cuda.is_available():
        module.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate
        )
        module._grad_accum_fusion_available = True
    return bool(module._grad_accum_fusion_available)
