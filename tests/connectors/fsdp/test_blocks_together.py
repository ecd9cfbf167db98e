"""Blocks whose weights are gathered at once: how many, and that steps do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from millrace.connectors.trainers.fsdp import packed_model
from millrace.connectors.trainers.fsdp.rank import FsdpRank
from millrace.core.contracts.task_records import StepRequest
from tests.connectors.fsdp.test_fsdp_trainer import fsdp

LIMIT = 100


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([10], [1]),
        ([50, 50, 50], [2, 1]),
        ([50, 51, 49, 2], [1, 2, 1]),
        ([400, 400, 10, 10], [1, 1, 2]),
        ([10] * 25, [10, 10, 5]),
    ],
)
def test_blocks_are_gathered_together_up_to_a_number_of_parameters(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], groups: list[int]
) -> None:
    monkeypatch.setattr(packed_model, "GATHERED", LIMIT)
    blocks = [torch.nn.Linear(size, 1, bias=False) for size in sizes]
    found = [*packed_model.together([(each, [each]) for each in blocks])]
    assert [len(group) for group in found] == groups
    assert [unit for group in found for unit, _ in group] == blocks


def steps(folder: Path, batch: str) -> tuple[int, list[float], list[torch.Tensor]]:
    """Units that FSDP gathers, the gradient norms of steps, and the weights after them."""
    rank = FsdpRank(fsdp(folder, recompute="full"), 0, 1)
    rank.setup(rank.address())
    try:
        norms = [rank.train(StepRequest(step, batch.format(step)))["grad_norm"] for step in (1, 2)]
        model = rank.learner.policy.inner
        states = {id(part._get_fsdp_state()) for part in model.modules() if isinstance(part, FSDPModule)}
        weights = [each.detach().full_tensor().clone() for each in model.parameters()]  # type: ignore[attr-defined]
        return len(states), norms, weights
    finally:
        rank.shutdown()


def test_steps_are_the_same_however_many_blocks_are_gathered_at_once(
    model: Callable[..., Path], batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model("qwen3")
    found: dict[int, Any] = {}
    for limit in (0, 2**27):
        monkeypatch.setattr(packed_model, "GATHERED", limit)
        found[limit] = steps(folder, batch)
    (alone, norms, weights), (joined, same, others) = found.values()
    assert (alone, joined) == (3, 2), "two blocks and the root"
    assert norms == same
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
