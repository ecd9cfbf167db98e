"""What selective and full recomputation keep for the backward pass, and that nothing else of it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.connectors.trainers.ops.fused import drop
from tests.support.trainer_ranks import VOCAB, Workers, configuration

TOKENS = 2048
WIDER = {"hidden_size": 64, "intermediate_size": 192, "max_position_embeddings": TOKENS}


def kept(rank: Any) -> tuple[int, list[float]]:
    """Bytes that the layers keep for the backward pass, weights left out, and what the gradients are then."""
    import numpy as np

    from millrace.connectors.trainers.megatron.model.attention import PackBounds
    from millrace.connectors.trainers.megatron.process.distributed import model_context
    from millrace.connectors.trainers.packing import BatchRow, make_pack

    tokens = np.random.default_rng(0).integers(0, VOCAB, TOKENS)
    row = BatchRow("a", tokens, 4, np.ones(4, np.int64), np.zeros(4, np.float32), 1.0, 1.0, None, False, 1)
    pack = make_pack([row], [0], cp_size=1, cp_rank=0, align=1, device=rank.device)
    model = rank.learner.policy.models[0]
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with model_context(rank.device):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            hidden = model(
                input_ids=pack.input_ids,
                position_ids=pack.position_ids,
                attention_mask=None,
                packed_seq_params=PackBounds.of(pack),
            )
        held = {x.untyped_storage()._cdata: x.untyped_storage() for x in saved}
        size = sum(s.nbytes() for s in held.values() if s.data_ptr() not in weights)
        rank.learner.policy.zero_grad()
        hidden.square().sum().backward()
    return size, [float(p.main_grad.double().abs().sum()) for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("qwen3", 0.85),
        ("qwen3_moe", 0.9),
        pytest.param("glm4", 0.9, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 0.95, marks=pytest.mark.slow),
    ],
)
def test_selective_keeps_less_than_none_and_more_than_full(
    workers: Workers, model: Callable[..., Path], kind: str, left: float
) -> None:
    sizes, gradients = {}, {}
    for how in ("none", "selective", "full"):
        with workers.group(configuration(model(kind, **WIDER), recompute=how)) as group:
            ((sizes[how], gradients[how]),) = group.run(kept)
    assert 2 * sizes["full"] < sizes["selective"] < left * sizes["none"]
    assert gradients["selective"] == gradients["full"] == gradients["none"]


def test_what_is_dropped_has_no_memory_until_the_gradient_is_there_and_then_the_same_bits() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    x, calls = torch.randn(5, 3), 0

    def again() -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x.sin()

    (x.sin() @ weight).square().sum().backward()
    expected, weight.grad = weight.grad, None
    made = x.sin()
    out = made @ weight
    drop(made, again, out)
    assert made.untyped_storage().nbytes() == 0
    out.square().sum().backward()
    assert calls == 1
    assert torch.equal(weight.grad, expected)


def test_nothing_is_dropped_where_there_will_be_no_backward_pass() -> None:
    made = torch.ones(3)
    drop(made, lambda: torch.zeros(3), made * 2)
    assert made.tolist() == [1, 1, 1]
