"""Experts of a layer as grouped products (`torch.nn.functional.grouped_mm`), instead of one after the other.

Owns the products, their gradients and how experts' weights lie in memory. The inner activation is computed again in the backward
pass. Weights of experts multiply after the second product, in fp32; their gradient is the dot product of the activation with its
own gradient, which needs no other product.

Compared with experts one after the other, products have the same bits on a CPU. A clamped gate may round otherwise, since the
vectors of its sigmoid end elsewhere, and so do gradients, which are weighted after a product instead of before it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import grouped_mm

from millrace.connectors.trainers.megatron.model.expert_rows import ExpertRows, in_rows, sum_rows, take_rows
from millrace.connectors.trainers.ops import fused
from millrace.connectors.trainers.ops.logprobs import mark_gradient_added

ALIGNED = 16  # bytes, of which grouped products need a multiple in each row of a matrix


class Settings(NamedTuple):
    """What the products need besides tensors."""

    experts: int
    limit: float | None  # of a clamped gate; None: silu
    adds: bool  # whether gradients of weights are added to their fp32 totals here, instead of by autograd


def fits(experts: SequentialMLP) -> bool:
    """Whether the experts can be grouped: each row of their weights is a multiple of 16 bytes."""
    expert = experts.local_experts[0]
    weights = expert.linear_fc1.weight, expert.linear_fc2.weight
    return all(weight.shape[1] * weight.element_size() % ALIGNED == 0 for weight in weights)


def grouped(x: Tensor, weights: Tensor, rows: ExpertRows, experts: SequentialMLP) -> Tensor:
    """For each token [T, H] the sum of its experts' outputs, times their weights [T, k]."""
    adds = experts.config.gradient_accumulation_fusion
    settings = Settings(len(experts.local_experts), experts.local_experts[0].activation_func.limit, adds)
    out: Tensor = _Grouped.apply(x, weights, rows, settings, *parameters_of(experts))
    return out


def parameters_of(experts: SequentialMLP) -> list[Tensor]:
    """First weights, second weights and, if experts have biases, first and second biases, from the last expert."""
    layers = [(e.linear_fc1, e.linear_fc2) for e in list(experts.local_experts)[::-1]]
    kinds: list[Callable[[Any], Tensor]] = [lambda layer: layer.weight]
    if layers[0][0].bias is not None:
        kinds.append(lambda layer: layer.bias)
    return [kind(pair[place]) for kind in kinds for place in (0, 1) for pair in layers]


def stacked(parts: Sequence[Tensor]) -> Tensor | None:
    """A view [n, ...] of equal tensors that lie at equal distances in one storage, in this order; None if they do not."""
    first = parts[0]
    starts = [part.data_ptr() for part in parts]
    step = starts[1] - starts[0] if len(parts) > 1 else first.nbytes
    storage = first.untyped_storage().data_ptr()
    together = all(
        start == starts[0] + number * step and part.untyped_storage().data_ptr() == storage
        for number, (start, part) in enumerate(zip(starts, parts, strict=True))
    )
    if not together or step < first.nbytes or step % first.element_size():
        return None
    return first.as_strided((len(parts), *first.shape), (step // first.element_size(), *first.stride()))


def pack_weights(experts: SequentialMLP) -> None:
    """Move the experts' weights together, as `stacked` needs them. megatron's optimizer moves what it trains again."""
    count = len(experts.local_experts)
    parameters = parameters_of(experts)
    for start in range(0, len(parameters), count):
        part = parameters[start : start + count]
        together = torch.stack([parameter.data for parameter in part])
        for parameter, place in zip(part, together, strict=True):
            parameter.data = place


def together(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one operand of a product, whose matrices start at multiples of 16 bytes: a view if possible, else a copy."""
    view = stacked(parts)
    if view is None or view.data_ptr() % ALIGNED or view.stride(0) * view.element_size() % ALIGNED:
        return torch.stack(list(parts))
    return view


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, rows: ExpertRows, settings: Settings, *parameters: Tensor
    ) -> Tensor:
        x = x.contiguous()
        first, second, *biases = _kinds(parameters, settings.experts)
        inner = grouped_mm(take_rows(x, rows.tokens), together(first).mT, offs=rows.ends)
        if biases:
            inner += together(biases[0])[rows.groups]
        out = grouped_mm(activated(inner, settings.limit), together(second).mT, offs=rows.ends)
        if biases:
            out += together(biases[1])[rows.groups]
        ctx.save_for_backward(x, weights, inner)
        ctx.rows, ctx.settings, ctx.parameters = rows, settings, parameters
        return sum_rows(out, rows.places, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, inner = ctx.saved_tensors
        rows, settings = ctx.rows, ctx.settings
        first, second, *biases = _kinds(ctx.parameters, settings.experts)
        grad = take_rows(grads[0].contiguous(), rows.tokens)
        of_rows = in_rows(weights, rows)
        of_activated = grouped_mm(grad, together(second), offs=rows.ends)
        of_inner, activated, dots = gate_backward(inner, of_activated, of_rows, settings.limit)
        if biases:
            dots = dots + (grad.to(dots.dtype) * together(biases[1])[rows.groups]).sum(-1)
        of_parameters: list[Tensor | None] = [None] * len(ctx.parameters)
        if first[0].requires_grad:  # else all are frozen: adapters of other layers train
            seconds = _added(second, grouped_mm(grad.mT, activated, offs=rows.ends), settings)
            of_biases = _bias_grads(biases, grad, of_inner, of_rows, rows, settings) if biases else []
            del activated, of_activated
            taken = take_rows(x, rows.tokens)
            firsts = _added(first, grouped_mm(of_inner.mT, taken, offs=rows.ends), settings)
            of_parameters = [*firsts, *seconds, *of_biases]
            del grad, taken
        of_x = sum_rows(grouped_mm(of_inner, together(first), offs=rows.ends), rows.places)
        return of_x, dots[rows.places].to(weights.dtype), None, None, *of_parameters


def _bias_grads(
    biases: list[Sequence[Tensor]],
    grad: Tensor,
    of_inner: Tensor,
    of_rows: Tensor,
    rows: ExpertRows,
    settings: Settings,
) -> list[Tensor | None]:
    """Gradients of both biases, of outputs' gradients [R, H] and of those of the activation's inputs [R, 2 h]."""
    return [
        *_added(biases[0], _sums(of_inner, torch.ones_like(of_rows), rows), settings),
        *_added(biases[1], _sums(grad, of_rows, rows), settings),
    ]


def _kinds(parameters: Sequence[Tensor], experts: int) -> list[Sequence[Tensor]]:
    return [parameters[start : start + experts] for start in range(0, len(parameters), experts)]


def activated(x: Tensor, limit: float | None) -> Tensor:
    """The activation of experts [R, 2 h] -> [R, h]: gated by silu or, with a limit, by a clamped gate."""
    if limit is None:
        return fused.gated_silu(x)
    if fused.has_kernels(x):
        from millrace.connectors.trainers.megatron.model import expert_kernels

        return expert_kernels.gate(x, limit)
    return fused.clamped_gate(x, limit)


def gate_backward(
    x: Tensor, grad: Tensor, weights: Tensor, limit: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the activation's input [R, 2 h], weighted activations [R, h] and gradients of the weights [R].

    grad: of the weighted activation, without the weights.
    """
    if fused.has_kernels(x):
        from millrace.connectors.trainers.megatron.model import expert_kernels

        return expert_kernels.gate_backward(x, grad, weights, limit)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = activated(x, limit)
    (of_x,) = torch.autograd.grad(out, x, (grad * weights[:, None]).to(grad.dtype))
    out = out.detach()
    return of_x, (out * weights[:, None]).to(out.dtype), (grad.to(weights.dtype) * out).sum(-1)


def _sums(grad: Tensor, weights: Tensor, rows: ExpertRows) -> Tensor:
    """For each expert the sum of its rows' gradients [R, h] -> [E, h], times weights [R]. A product, so that its order is fixed."""
    columns = grad.new_zeros(len(grad), ALIGNED // grad.element_size())
    columns[:, 0] = weights
    return grouped_mm(grad.mT, columns, offs=rows.ends)[:, :, 0]


def _added(parameters: Sequence[Tensor], grads: Tensor, settings: Settings) -> list[Tensor | None]:
    """Gradients for autograd; None for each if they were added to the fp32 totals of megatron's gradient buffer."""
    if not (settings.adds and hasattr(parameters[0], "main_grad")):
        return list(grads)
    totals = [parameter.main_grad for parameter in parameters]  # type: ignore[attr-defined]
    together = stacked(totals)
    if together is None:
        for total, grad in zip(totals, grads, strict=True):
            total.add_(grad)
    else:
        together.add_(grads)
    for parameter in parameters:
        mark_gradient_added(parameter)
    return [None] * len(parameters)
