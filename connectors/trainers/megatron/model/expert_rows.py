"""Rows of a mixture of experts: a copy of each token for each of its experts, in the order of the experts, and their sum.

Owns the permutation and its gradients. A token's rows are summed by reading them, in the order of their experts: no atomic
addition, so repeated runs are equal on a GPU too. Knows nothing of what an expert computes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from millrace.connectors.trainers.ops.fused import has_kernels


class ExpertRows(NamedTuple):
    """Where the rows of T tokens lie, k each. Experts are in reverse order, as megatron lays their gradients in memory."""

    tokens: Tensor  # [R] int64: the token of each row
    places: Tensor  # [T, k] int64: the row of each choice
    groups: Tensor  # [R] int64: the number of each row's expert, from the last expert
    ends: Tensor  # [E] int32: the end of each expert's rows, from the last expert; the last end is R


def choices(routing_map: Tensor, count: int) -> Tensor:
    """The `count` experts of each token [T, k], ascending, from the map of tokens to experts [T, E]."""
    return routing_map.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]


def rows_of(chosen: Tensor, experts: int) -> ExpertRows:
    """The rows of tokens with these experts [T, k]. An expert's rows are in the order of their tokens."""
    groups, order = (experts - 1 - chosen.flatten()).sort(stable=True)
    numbers = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, numbers)
    ends = torch.searchsorted(groups, torch.arange(experts, device=groups.device), right=True, out_int32=True)
    return ExpertRows(order // chosen.shape[1], places.view(chosen.shape), groups, ends)


def spread(x: Tensor, rows: ExpertRows) -> Tensor:
    """The rows [R, H] of tokens [T, H]; their gradients are summed token by token."""
    out: Tensor = _Spread.apply(x, rows)
    return out


def gathered(values: Tensor, weights: Tensor | None, rows: ExpertRows) -> Tensor:
    """Sum of each token's rows [R, H] -> [T, H], times their weights [T, k]. Sums are in fp32; the result has the rows' dtype."""
    out: Tensor = _Gathered.apply(values, weights, rows)
    return out


def take_rows(x: Tensor, places: Tensor) -> Tensor:
    """x[places], without a gradient."""
    if has_kernels(x):
        from millrace.connectors.trainers.ops import kernels

        return kernels.take_rows(x, places)
    return x.index_select(0, places)


def sum_rows(values: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """`gathered`, without a gradient."""
    if has_kernels(values):
        from millrace.connectors.trainers.megatron.model import expert_kernels

        return expert_kernels.sum_rows(values, places, weights)
    total = _term(values, places, weights, 0)
    for choice in range(1, places.shape[1]):
        total = total + _term(values, places, weights, choice)
    return total.to(values.dtype)


def _term(values: Tensor, places: Tensor, weights: Tensor | None, choice: int) -> Tensor:
    term = values.index_select(0, places[:, choice]).to(torch.promote_types(values.dtype, torch.float32))
    return term if weights is None else term * weights[:, choice, None]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return take_rows(x.contiguous(), rows.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_rows(grads[0].contiguous(), ctx.rows.places), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor | None, rows: ExpertRows) -> Tensor:
        values = values.contiguous()
        ctx.rows = rows
        ctx.save_for_backward(None if weights is None else values, weights)
        return sum_rows(values, rows.places, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, weights = ctx.saved_tensors
        grad = take_rows(grads[0].contiguous(), ctx.rows.tokens)
        if weights is None:
            return grad, None, None
        dots = (grad.to(weights.dtype) * values).sum(-1)[ctx.rows.places]
        of_rows = in_rows(weights, ctx.rows)[:, None]
        return (grad * of_rows).to(values.dtype), dots.to(weights.dtype), None


def in_rows(weights: Tensor, rows: ExpertRows) -> Tensor:
    """Weights of choices [T, k] in the order of the rows [R]."""
    return torch.empty_like(weights).flatten().scatter_(0, rows.places.flatten(), weights.flatten())
