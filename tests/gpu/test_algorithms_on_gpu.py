"""The algorithms give on the GPU what they give on the CPU, deterministic kernels demanded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from millrace.core.algorithms import aggregate
from millrace.core.algorithms.aggregate import spread
from millrace.core.algorithms.credit import token_credit
from millrace.core.algorithms.group_advantages import group_advantages
from millrace.core.algorithms.objective import Objective
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.algorithm.presets import PRESETS
from millrace.core.contracts.token_batch import TokenBatch

LENGTHS = torch.tensor([300, 1, 129, 700, 64, 5])
N = int(LENGTHS.sum())


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rand(seed: int) -> Tensor:
    return torch.rand(N, generator=torch.Generator().manual_seed(seed))


def on_both(function: Callable[[Callable[[Tensor], Tensor]], list[Tensor]]) -> None:
    """The function gets what moves a tensor to its device; its results must agree."""
    here, there = function(lambda x: x.clone()), function(lambda x: x.cuda())
    for a, b in zip(here, there, strict=True):
        assert b.is_cuda
        torch.testing.assert_close(b.cpu(), a, rtol=2e-5, atol=2e-5)


MASK = (rand(0) > 0.2).long()


@pytest.mark.parametrize("name", PRESETS)
def test_objective(name: str) -> None:
    config = Algorithm(
        preset=name,
        kl_coef=0.1,
        entropy_coef=0.01,
        correction={
            "kind": "mask",
            "level": "sequence_geometric",
            "low": 0.8,
            "high": 1.2,
            "veto": 0.2,
            "opsm_delta": 0.01,
        },
    )
    counts = torch.stack([part.sum() for part in torch.split(MASK, LENGTHS.tolist())])

    def run(to: Callable[[Tensor], Tensor]) -> list[Tensor]:
        old = to(-2 * rand(1))
        weights = spread(aggregate.sample_weights(to(counts), config, max_length=700), to(LENGTHS))
        logprobs = (old + to(0.4 * (rand(2) - 0.5))).requires_grad_()
        batch = TokenBatch(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=old + to(0.3 * (rand(3) - 0.5)),
            ref_logprobs=old + to(0.3 * (rand(4) - 0.5)),
            advantages=to(rand(5) - 0.5),
            mask=to(MASK),
            lengths=to(LENGTHS),
            weights=weights,
            entropy=to(rand(6)),
        )
        assert all(
            getattr(batch, item.name) is None or getattr(batch, item.name).device == old.device
            for item in fields(batch)
        )
        loss, metrics = Objective(config)(batch)
        loss.backward()
        assert logprobs.grad is not None
        means = [value / weight for value, weight in metrics.values()]
        return [loss.detach(), logprobs.grad, *means]

    on_both(run)


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "opd"])
def test_advantages(name: str) -> None:
    changes = {"ppo": {"gamma": 0.99, "lam": 0.95}, "reinforce_plus_plus": {"gamma": 0.99}}
    config = Algorithm(preset=name, **({"advantage": changes[name]} if name in changes else {}))

    def run(to: Callable[[Tensor], Tensor]) -> list[Tensor]:
        rewards, groups = (
            to(torch.tensor([1.0, 0.0, torch.nan, 1.0, 0.5, 0.5])),
            to(torch.tensor([0, 0, 0, 0, 1, 1])),
        )
        found = token_credit(
            config,
            rewards=rewards,
            sample_advantages=group_advantages(rewards, groups, config),
            mask=to(MASK),
            lengths=to(LENGTHS),
            logprobs=to(-rand(1)),
            ref_logprobs=to(-rand(2)),
            values=to(rand(3)),
        )
        return [x for x in found if x is not None]

    on_both(run)


def test_sequence_weights() -> None:
    def run(to: Callable[[Tensor], Tensor]) -> list[Tensor]:
        weights = aggregate.sequence_mean(to(torch.tensor([3, 1, 0, 2])))
        return [weights]

    on_both(run)
