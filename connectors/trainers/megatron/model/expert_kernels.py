"""Triton kernels of a mixture of experts: sums of tokens' rows, and the gated activation with its gradient.

Only pointers and launches: `expert_rows` and `grouped_experts` make autograd functions of them. All arithmetic is in fp32 for
any dtype; sums have a fixed order, so that repeated runs are equal. Imported only if there is a GPU.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.core.families.decoder import GATE_SLOPE


@triton.jit
def _sum_rows(
    rows, places, weights, out, width, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(K):
        place = tl.load(places + token * K + choice)
        values = tl.load(rows + place * width + at, mask=live, other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weights + token * K + choice).to(tl.float32)
        total += values
    tl.store(out + token * width + at, total, mask=live)


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Row t is the sum of rows[places[t]], times weights[t] if given; all contiguous."""
    (count, choices), width = places.shape, rows.shape[1]
    out = rows.new_empty(count, width)
    block = min(1024, triton.next_power_of_2(width))
    if count:
        _sum_rows[(count, triton.cdiv(width, block))](
            rows, places, places if weights is None else weights, out, width,
            K=choices, WEIGHTED=weights is not None, BLOCK=block,
        )  # fmt: skip
    return out


@triton.jit
def _gate_forward(x, out, width, count, slope, limit, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    place = at // width * 2 * width + at % width
    gate = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x + place + width, mask=live, other=0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
    tl.store(out + at, gate * tl.sigmoid(slope * gate) * up, mask=live)


@triton.jit
def _gate_backward(
    x, grad, weights, grad_x, weighted, dots, width, slope, limit, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    dot = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        live = at < width
        given = tl.load(x + row * 2 * width + at, mask=live, other=0.0).to(tl.float32)
        given_up = tl.load(x + row * 2 * width + width + at, mask=live, other=0.0).to(tl.float32)
        g = tl.load(grad + row * width + at, mask=live, other=0.0).to(tl.float32)
        gate, up = given, given_up
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        sigmoid = tl.sigmoid(slope * gate)
        value = gate * sigmoid * up
        dot += g * value
        tl.store(weighted + row * width + at, value * weight, mask=live)
        g = g * weight
        of_gate = g * up * sigmoid * (1 + slope * gate * (1 - sigmoid))
        of_up = g * gate * sigmoid
        if CLAMPED:
            of_gate = tl.where(given <= limit, of_gate, 0.0)
            of_up = tl.where((given_up >= -limit) & (given_up <= limit), of_up, 0.0)
        tl.store(grad_x + row * 2 * width + at, of_gate, mask=live)
        tl.store(grad_x + row * 2 * width + width + at, of_up, mask=live)
    tl.store(dots + row, tl.sum(dot, 0))


def gate(x: Tensor, limit: float | None) -> Tensor:
    """The gated activation of [R, 2 h], as `fused.gated_silu` or, with a limit, `fused.clamped_gate`; x contiguous."""
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    if out.numel():
        _gate_forward[(triton.cdiv(out.numel(), 1024),)](
            x, out, width, out.numel(), *_constants(limit), CLAMPED=limit is not None, BLOCK=1024
        )
    return out


def gate_backward(
    x: Tensor, grad: Tensor, weights: Tensor, limit: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For rows of an activation that are weighted afterwards: the gradient of x, weighted activations, and gradients of weights.

    x [R, 2 h]; grad [R, h], of the weighted activation; weights [R]. Gradients of weights are in fp32.
    """
    width = x.shape[-1] // 2
    grad_x, weighted = torch.empty_like(x), torch.empty_like(grad)
    dots = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        _gate_backward[(len(x),)](
            x, grad, weights, grad_x, weighted, dots, width, *_constants(limit),
            CLAMPED=limit is not None, BLOCK=min(1024, triton.next_power_of_2(width)),
        )  # fmt: skip
    return grad_x, weighted, dots


def _constants(limit: float | None) -> tuple[float, float]:
    return (1.0, 0.0) if limit is None else (GATE_SLOPE, limit)
