"""Sampling from logits: distributions, cut-offs, parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.connectors.engines.embedded.sampling import (
    RequestError,
    SamplingParams,
    penalise,
    sample,
    uniform,
)

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
DRAWS = [(n + 0.5) / 4000 for n in range(4000)]


def frequencies(**params: Any) -> torch.Tensor:
    """Share of each token over evenly spread draws."""
    parsed = SamplingParams.parse(params)
    tokens, _ = sample(LOGITS.repeat(len(DRAWS), 1), [parsed] * len(DRAWS), DRAWS)
    return torch.bincount(torch.tensor(tokens), minlength=5) / len(DRAWS)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_tokens_come_with_their_probability_at_the_temperature(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert frequencies(temperature=temperature).tolist() == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 1}, 1),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.7}, 2),
        ({"top_p": 0.95}, 4),
        ({"min_p": 0.2}, 3),
        ({"min_p": 1.0}, 1),
        ({"top_k": 3, "min_p": 0.3}, 2),
        ({"top_p": 1e-9}, 1),
    ],
    ids=str,
)
def test_what_is_kept_has_its_renormalised_probability(cut: dict[str, float], kept: int) -> None:
    probabilities = LOGITS.softmax(-1)
    expected = torch.where(torch.arange(5) < kept, probabilities, torch.zeros(()))
    assert frequencies(**cut).tolist() == pytest.approx((expected / expected.sum()).tolist(), abs=1e-3)


def test_logprobs_are_those_before_cutting() -> None:
    params = [
        SamplingParams.parse({"temperature": 0.7, "top_k": 1}),
        SamplingParams.parse({"temperature": 0}),
    ]
    _, logprobs = sample(LOGITS.repeat(2, 1), params, [0.5, 0.5])
    assert torch.allclose(logprobs[0], (LOGITS / 0.7).log_softmax(-1))
    assert torch.allclose(logprobs[1], LOGITS.log_softmax(-1))


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    params = [SamplingParams.parse(p) for p in ({"temperature": 0}, {"top_k": 1}, {"temperature": 2.0})]
    tokens, _ = sample(LOGITS.repeat(3, 1), params, [0.999, 0.999, 0.999])
    assert tokens == [0, 0, 4]


@given(st.integers(0, 2**63), st.integers(0, 10**6))
@settings(deadline=None, derandomize=True)
def test_draws_lie_strictly_between_0_and_1_and_follow_from_seed_and_position(
    seed: int, position: int
) -> None:
    assert 0 < uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)


def test_draws_of_neighbouring_seeds_and_positions_are_uniform_and_uncorrelated() -> None:
    grid = torch.tensor([[uniform(seed, position) for position in range(100)] for seed in range(100)])
    assert float(grid.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(grid.var()) == pytest.approx(1 / 12, abs=0.005)
    for first, second in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        together = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))
        assert abs(float(together[0, 1])) < 0.05


def test_penalties_follow_their_definitions() -> None:
    params = SamplingParams.parse(
        {"frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {"4": 3.0}}
    )
    changed = penalise(LOGITS, params, prompt=[0], generated=[1, 1, 2])
    assert changed.tolist() == pytest.approx([2.0, 1.0 - 1.25, 0.5 - 0.75, 0.0, 2.0])
    params = SamplingParams.parse({"repetition_penalty": 2.0})
    assert penalise(LOGITS, params, prompt=[0], generated=[4]).tolist() == pytest.approx(
        [1.0, 1.0, 0.5, 0.0, -2.0]
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"n": 0}, "n"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"temperature": math.nan}, "temperature"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"regex": "a"}, "regex"),
    ],
    ids=str,
)
def test_impossible_parameters_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=rf"sampling_params\.{named}"):
        SamplingParams.parse(given)


def test_null_means_the_default() -> None:
    assert SamplingParams.parse({"temperature": None, "stop": None}) == SamplingParams()
    assert SamplingParams.parse(None) == SamplingParams()
