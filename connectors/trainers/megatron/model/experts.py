"""The layer of a mixture of experts, and how its experts are computed.

Experts are grouped products, or computed one after the other, which is the definition that the products are compared with. Router,
shared expert and parameters are megatron's; its dispatcher gives the process groups alone.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from millrace.connectors.trainers.megatron.model.expert_exchange import exchanged
from millrace.connectors.trainers.megatron.model.expert_loads import ExpertLoads
from millrace.connectors.trainers.megatron.model.expert_rows import (
    ExpertRows,
    choices,
    gathered,
    rows_of,
    spread,
)
from millrace.connectors.trainers.megatron.model.grouped_adapters import grouped_with_adapters
from millrace.connectors.trainers.megatron.model.grouped_experts import fits, grouped
from millrace.connectors.trainers.ops.fused import in_plain_forms

_one_by_one = False


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """A context in which experts are computed one after the other."""
    global _one_by_one
    before, _one_by_one = _one_by_one, True
    try:
        yield
    finally:
        _one_by_one = before


class ExpertsLayer(MoELayer):
    """megatron's layer with millrace's way of tokens to experts and back."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.loads = ExpertLoads()

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[T, 1, H] -> [T, 1, H]."""
        if self.moe_layer_recompute:
            out: Tensor = tensor_parallel.checkpoint(self._mixed, False, hidden_states)
            return out, None
        return self._mixed(hidden_states), None

    def _mixed(self, hidden_states: Tensor) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.router(hidden_states)
        chosen = choices(routing_map, self.config.moe_router_topk)
        x, weights = hidden_states.view(-1, hidden_states.shape[-1]), probs.gather(1, chosen)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        ranks = self.token_dispatcher
        counts = torch.is_grad_enabled()  # recomputed layers come twice, first without gradients
        if counts:
            self.loads.add(routing_map)
        compute = partial(mixture, experts=self.experts)
        if ranks.ep_size == ranks.tp_size == 1:
            out = compute(x, weights, chosen)
        else:
            seen = self.loads.add_meeting if counts and ranks.ep_size > 1 else _not_counted
            out = exchanged(x, weights, chosen, ranks, self.local_expert_indices, compute, seen)
        out = out.view(hidden_states.shape)
        return out if shared is None else out + shared


def _not_counted(_: Tensor) -> None:
    """A pass without gradients, or ranks of which each has a part of every expert."""


def mixture(x: Tensor, weights: Tensor, chosen: Tensor, experts: SequentialMLP) -> Tensor:
    """For each token [T, H] the sum of the outputs of its experts [T, k], times their weights [T, k].

    Experts are computed one after the other in three cases: within `one_by_one`, in plain forms, and if a row of their weights is
    no multiple of 16 bytes. Otherwise they are grouped products.
    """
    rows = rows_of(chosen, len(experts.local_experts))
    if _one_by_one or in_plain_forms() or not fits(experts):
        return _one_after_the_other(x, weights, rows, experts)
    pairs = getattr(experts, "adapters", None)
    if pairs is not None:
        return grouped_with_adapters(x, weights, rows, experts, pairs)
    return grouped(x, weights, rows, experts)


def _one_after_the_other(x: Tensor, weights: Tensor, rows: ExpertRows, experts: SequentialMLP) -> Tensor:
    counts = rows.ends.diff(prepend=rows.ends.new_zeros(1)).tolist()
    outputs = []
    for expert, part in zip(reversed(experts.local_experts), spread(x, rows).split(counts), strict=True):
        out, bias = expert(part)
        outputs.append(out if bias is None else out + bias)
    return gathered(torch.cat(outputs), weights, rows)
