"""Context parallel ranks of FSDP's trainer: the loss and every gradient of one rank, of families and layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.connectors.fsdp.test_fsdp_trainer import fsdp, gradients
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers

FAMILIES = ["qwen3", "llama", "gemma3", "qwen3_moe", "deepseek_v3"]
LAYOUTS = {"cp 2": (2, 2), "cp 2 x dp 2": (4, 2)}  # ranks, and how many of them are context parallel
CASES = [pytest.param(kind, name, id=f"{kind}, {name}") for kind in FAMILIES for name in LAYOUTS]


@pytest.mark.parametrize(("kind", "layout"), slow_but(CASES, "gemma3, cp 2", "qwen3, cp 2 x dp 2"))
def test_loss_and_gradients_are_those_of_one_rank(
    workers: Workers, model: Callable[..., Path], batch: str, kind: str, layout: str
) -> None:
    world, context = LAYOUTS[layout]
    found, steps = [], []
    for ranks, size in ((1, 1), (world, context)):
        changes: dict[str, Any] = {"parallel": {"context": size}, "algorithm": {"kl_coef": 0.1}}
        with workers.group(fsdp(model(kind), ranks, **changes)) as group:
            found.append(group.run(gradients, batch.format(1)))
            steps.append([group.train([step], batch.format(step))[0] for step in (1, 2, 3)])
    (alone,), others = found
    for own in others:
        assert own.keys() == alone.keys()
        for name, gradient in alone.items():
            assert torch.equal(own[name], others[0][name]), "every rank has the same sum"
            assert (own[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
    for one, several in zip(*steps, strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=2e-6)
        assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert several["kl"] == pytest.approx(one["kl"], rel=1e-4, abs=1e-7)
        assert several["ratio_distance"] == 0
        assert several["tokens"] == one["tokens"]
