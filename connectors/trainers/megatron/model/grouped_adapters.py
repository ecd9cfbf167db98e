"""Experts of a layer with adapters as grouped products: the experts' weights are frozen, their pairs train.

Beside each product of all experts there are two narrow ones, of A and of B (`expert_adapters`). What `grouped_experts` computes
again in the backward pass is computed again here too, and the outputs of A with it. Zero pairs leave the same bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import grouped_mm

from millrace.connectors.trainers.megatron.model.expert_adapters import ExpertPairs, PairsOfExperts
from millrace.connectors.trainers.megatron.model.expert_rows import ExpertRows, in_rows, sum_rows, take_rows
from millrace.connectors.trainers.megatron.model.grouped_experts import (
    ALIGNED,
    activated,
    gate_backward,
    parameters_of,
    together,
)


class Frozen(NamedTuple):
    """What the products need besides the pairs and their inputs."""

    first: Sequence[Tensor]  # weights from the last expert
    second: Sequence[Tensor]
    limit: float | None  # as in grouped_experts
    scale: float


def grouped_with_adapters(
    x: Tensor, weights: Tensor, rows: ExpertRows, experts: SequentialMLP, pairs: PairsOfExperts
) -> Tensor:
    """`grouped_experts.grouped` of experts without biases, with what their pairs add."""
    parameters = parameters_of(experts)
    first, second = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
    frozen = Frozen(first, second, experts.local_experts[0].activation_func.limit, pairs.scale)
    out: Tensor = _Grouped.apply(x, weights, rows, frozen, *_tensors(pairs.first), *_tensors(pairs.second))
    return out


def _tensors(pairs: ExpertPairs | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if pairs is None else (pairs.A, pairs.B)


class _Operands:
    """A and B as operands of products: from the last expert, and with rows of whole multiples of 16 bytes."""

    def __init__(self, a: Tensor, b: Tensor, ends: Tensor) -> None:
        self.rank, self.ends = a.shape[2], ends
        each = ALIGNED // a.element_size()
        more = -self.rank % each
        self.a = F.pad(a.detach().flip(0), (0, 0, 0, more)).flatten(1, 2)  # [E, matrices · rank, in]
        self.b = [F.pad(one.flip(0), (0, more)) for one in b.detach().unbind(1)]  # [E, out, rank] each

    def narrow(self, x: Tensor) -> Tensor:
        """x A [R, matrices · rank]."""
        out: Tensor = grouped_mm(x, self.a.mT, offs=self.ends)
        return out

    def wide(self, narrow: Tensor) -> Tensor:
        """What B gives of it [R, out of all matrices]."""
        parts = narrow.chunk(len(self.b), dim=-1)
        return torch.cat(
            [
                grouped_mm(part.contiguous(), b.mT, offs=self.ends)
                for part, b in zip(parts, self.b, strict=True)
            ],
            dim=-1,
        )

    def narrow_grad(self, grad: Tensor) -> Tensor:
        """The gradient of `narrow`'s result, from that of `wide`'s."""
        parts = grad.chunk(len(self.b), dim=-1)
        return torch.cat(
            [grouped_mm(part.contiguous(), b, offs=self.ends) for part, b in zip(parts, self.b, strict=True)],
            dim=-1,
        )

    def x_grad(self, narrow_grad: Tensor) -> Tensor:
        """The gradient of `narrow`'s x."""
        grad: Tensor = grouped_mm(narrow_grad, self.a, offs=self.ends)
        return grad

    def a_grad(self, narrow_grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of A [E, matrices, rank, in], from the first expert."""
        grad: Tensor = grouped_mm(narrow_grad.mT, x, offs=self.ends).unflatten(1, (len(self.b), -1))
        return grad[:, :, : self.rank].flip(0)

    def b_grad(self, grad: Tensor, narrow: Tensor) -> Tensor:
        """The gradient of B [E, matrices, out, rank], from the first expert."""
        parts = zip(grad.chunk(len(self.b), dim=-1), narrow.chunk(len(self.b), dim=-1), strict=True)
        each = [
            grouped_mm(part.contiguous().mT, inputs.contiguous(), offs=self.ends) for part, inputs in parts
        ]
        return torch.stack(each, dim=1)[..., : self.rank].flip(0)


def _summed(narrow: Tensor) -> Tensor:
    """The sum over the tensor parallel ranks of experts, each of which has the same rows."""
    group = mpu.get_expert_tensor_parallel_group()
    if group.size() > 1:
        narrow = narrow.clone()
        dist.all_reduce(narrow, group=group)
    return narrow


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, rows: ExpertRows, frozen: Frozen, *pairs: Tensor | None
    ) -> Tensor:
        x = x.contiguous()
        first, second = _operands(pairs, rows)
        taken = take_rows(x, rows.tokens)
        inner = grouped_mm(taken, together(frozen.first).mT, offs=rows.ends)
        if first is not None:
            inner += first.wide(first.narrow(taken)) * frozen.scale
        activation = activated(inner, frozen.limit)
        out = grouped_mm(activation, together(frozen.second).mT, offs=rows.ends)
        if second is not None:
            out += second.wide(second.narrow(activation)) * frozen.scale
        ctx.save_for_backward(x, weights, inner, *pairs)
        ctx.rows, ctx.frozen = rows, frozen
        return sum_rows(out, rows.places, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, inner, *pairs = ctx.saved_tensors
        rows, frozen = ctx.rows, ctx.frozen
        first, second = _operands(pairs, rows)
        of_pairs: list[Tensor | None] = [None] * 4
        grad = take_rows(grads[0].contiguous(), rows.tokens)
        of_activated = grouped_mm(grad, together(frozen.second), offs=rows.ends)
        if second is not None:
            of_narrow = second.narrow_grad(grad) * frozen.scale
            of_activated += second.x_grad(of_narrow)
        of_inner, activation, dots = gate_backward(inner, of_activated, in_rows(weights, rows), frozen.limit)
        if second is not None:  # the activation is weighted here, and gradients of outputs are not
            narrow = _summed(second.narrow(activation)) * frozen.scale
            of_pairs[2:] = second.a_grad(of_narrow, activation), second.b_grad(grad, narrow)
        of_rows = grouped_mm(of_inner, together(frozen.first), offs=rows.ends)
        if first is not None:
            taken = take_rows(x, rows.tokens)
            of_narrow = first.narrow_grad(of_inner) * frozen.scale
            of_rows += first.x_grad(of_narrow)
            narrow = first.narrow(taken) * frozen.scale
            of_pairs[:2] = first.a_grad(_summed(of_narrow), taken), first.b_grad(of_inner, narrow)
        of_x = sum_rows(of_rows, rows.places)
        return of_x, dots[rows.places].to(weights.dtype), None, None, *of_pairs


def _operands(pairs: Sequence[Tensor | None], rows: ExpertRows) -> list[_Operands | None]:
    """Of the first and the second product; None without pairs."""
    return [
        None if a is None or b is None else _Operands(a, b, rows.ends)
        for a, b in zip(pairs[::2], pairs[1::2], strict=True)
    ]
