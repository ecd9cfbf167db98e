"""Comparisons of grouped experts with experts one after the other, on the layers of a trainer's rank, for any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.distances import distance

TOKENS = 37  # no multiple of anything


def _distinct(tokens: int, count: int, experts: int) -> Tensor:
    return torch.rand(tokens, experts).argsort(1)[:, :count].sort(1).values


# experts [T, k] of tokens, by what is special
ROUTINGS: dict[str, Callable[[int, int], Tensor]] = {
    "random": lambda count, experts: _distinct(TOKENS, count, experts),
    "an expert without tokens": lambda count, experts: _distinct(TOKENS, count, experts - 1) + 1,
    "all tokens to the same experts": lambda count, experts: torch.arange(count).repeat(TOKENS, 1),
    "one expert a token": lambda count, experts: _distinct(TOKENS, 1, experts),
    "all tokens to one expert": lambda count, experts: torch.full((TOKENS, 1), experts - 1),
    "one token": lambda count, experts: _distinct(1, count, experts),
    "no token": lambda count, experts: torch.empty(0, count, dtype=torch.int64),
}


def experts_layers(rank: Any) -> list[Any]:
    from millrace.connectors.trainers.megatron.model.experts import ExpertsLayer

    return [part for part in rank.learner.policy.inner.modules() if isinstance(part, ExpertsLayer)]


class Mixture:
    """The experts of a layer, and inputs of a routing."""

    def __init__(self, rank: Any, routing: str, *, equal_tokens: bool = False) -> None:
        from millrace.connectors.trainers.megatron.model.grouped_experts import parameters_of

        torch.manual_seed(0)
        layer, device = experts_layers(rank)[0], rank.device
        self.experts, self.parameters = layer.experts, parameters_of(layer.experts)
        if hasattr(layer.experts, "adapters"):
            self.parameters = _pairs(layer.experts.adapters)
        for parameter in self.parameters:
            assert parameter.abs().sum() > 0
        chosen = ROUTINGS[routing](layer.config.moe_router_topk, layer.config.num_moe_experts)
        size, dtype = layer.config.hidden_size, self.parameters[0].dtype
        x = torch.randn(1 if equal_tokens else len(chosen), size).expand(len(chosen), size)
        self.chosen = chosen.to(device)
        self.x = x.to(device, dtype, copy=True).contiguous().requires_grad_()
        self.weights = torch.rand(chosen.shape).softmax(-1).to(device).requires_grad_()
        self.grad = torch.randn(x.shape).to(device, dtype)

    def passes(self) -> tuple[Tensor, list[Tensor]]:
        """The output, and gradients of x, weights and parameters, from autograd alone."""
        from millrace.connectors.trainers.megatron.model.experts import mixture

        fused = self.experts.config.gradient_accumulation_fusion
        for module in self.experts.modules():
            if hasattr(module, "gradient_accumulation_fusion"):
                module.gradient_accumulation_fusion = False
        self.experts.config.gradient_accumulation_fusion = False
        try:
            out = mixture(self.x, self.weights, self.chosen, self.experts)
            inputs = [self.x, self.weights, *self.parameters]
            return out.detach(), list(torch.autograd.grad(out, inputs, self.grad))
        finally:
            self.experts.config.gradient_accumulation_fusion = fused
            for module in self.experts.modules():
                if hasattr(module, "gradient_accumulation_fusion"):
                    module.gradient_accumulation_fusion = fused


def _pairs(adapters: Any) -> list[Tensor]:
    """The parameters of the pairs of experts, none of which is zero any more."""
    parameters = [each for held in adapters[:2] if held is not None for each in held.parameters()]
    with torch.no_grad():
        for each in parameters:
            each.copy_(torch.randn(each.shape) * 0.2)
    return parameters


def both_ways(rank: Any, routing: str, equal_tokens: bool = False) -> dict[str, float]:
    """How far grouped experts are from experts one after the other: `output`, and `gradient`, the largest of all gradients."""
    from millrace.connectors.trainers.megatron.model.experts import one_by_one

    given = Mixture(rank, routing, equal_tokens=equal_tokens)
    out, grads = given.passes()
    with one_by_one():
        expected, slow = given.passes()
    far = [distance(one, other) for one, other in zip(grads, slow, strict=True)]
    return {"output": distance(out, expected), "gradient": max(far)}


def equal_again(rank: Any, routing: str, between: Callable[[], None]) -> bool:
    """Whether two passes of grouped experts have the same bits, whatever `between` them leaves in memory."""
    given = Mixture(rank, routing)
    first = given.passes()
    between()
    second = given.passes()
    pairs = zip([first[0], *first[1]], [second[0], *second[1]], strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def poison(device: Any) -> None:
    """Leave NaN in the memory that the next tensors get."""
    sizes = [2**power for power in range(8, 22)]
    kept = [torch.full((size,), torch.nan, device=device) for size in sizes for _ in range(8)]
    del kept


def totals(rank: Any, routing: str) -> dict[str, float]:
    """How far fp32 totals, to which two passes added their gradients, are from twice autograd's gradients.

    `marked` is the number of parameters whose gradient counts as added.
    """
    from millrace.connectors.trainers.megatron.model.experts import mixture

    given = Mixture(rank, routing)
    _, (_, _, *grads) = given.passes()
    config = given.experts.config
    fused, config.gradient_accumulation_fusion = config.gradient_accumulation_fusion, True
    try:
        for parameter in given.parameters:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
        for _ in range(2):
            mixture(given.x, given.weights, given.chosen, given.experts).backward(given.grad)
        # DDP's hook takes the gradient away that marks the parameter
        marked = sum(getattr(parameter, "grad_added_to_main_grad", False) for parameter in given.parameters)
    finally:
        config.gradient_accumulation_fusion = fused
    sums = [parameter.main_grad.clone() for parameter in given.parameters]  # type: ignore[attr-defined]
    far = max(distance(total, 2 * grad.float()) for total, grad in zip(sums, grads, strict=True))
    rank.learner.policy.zero_grad()
    return {"far": far, "marked": marked, "parameters": len(given.parameters)}


class Products(TorchDispatchMode):
    """Counts grouped products."""

    count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += call is torch.ops.aten._grouped_mm.default
        return call(*args, **(kwargs or {}))


def frozen(rank: Any) -> dict[str, Any]:
    """Grouped products of both passes of experts that train and of frozen ones, and whether their other gradients are equal."""
    from millrace.connectors.trainers.megatron.model.experts import mixture

    given, products, grads = Mixture(rank, "random"), [], []
    for trains in (True, False):
        for parameter in given.parameters:
            parameter.requires_grad_(trains)
        with Products() as counted:
            out = mixture(given.x, given.weights, given.chosen, given.experts)
            inputs = [given.x, given.weights, *(given.parameters if trains else [])]
            grads.append(torch.autograd.grad(out, inputs, given.grad)[:2])
        products.append(counted.count)
    for parameter in given.parameters:
        parameter.requires_grad_(True)
    return {"products": products, "equal": all(map(torch.equal, *grads))}


def in_place(rank: Any) -> dict[str, bool]:
    """Whether weights and fp32 gradients of all layers' experts are read where they lie, without a copy."""
    from millrace.connectors.trainers.megatron.model.grouped_experts import parameters_of, stacked, together

    every: dict[str, list[bool]] = {"weights": [], "gradients": []}
    for layer in experts_layers(rank):
        parameters, count = parameters_of(layer.experts), len(layer.experts.local_experts)
        for start in range(0, len(parameters), count):
            part = parameters[start : start + count]
            every["weights"].append(together(part).data_ptr() == part[0].data_ptr())
            every["gradients"].append(stacked([each.main_grad for each in part]) is not None)
    return {name: all(found) and len(found) > 0 for name, found in every.items()}


def routers_choose(rank: Any) -> bool:
    """Whether `choices` finds each token's experts in ascending order, from the map of a router."""
    from millrace.connectors.trainers.megatron.model.expert_rows import choices

    chosen = _distinct(TOKENS, 3, 11)
    routing_map = torch.zeros(TOKENS, 11, dtype=torch.bool).scatter_(1, chosen, True)
    return torch.equal(choices(routing_map.to(rank.device), 3).cpu(), chosen)
