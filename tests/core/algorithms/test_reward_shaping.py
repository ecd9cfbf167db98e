"""Penalties on rewards."""

from __future__ import annotations

import math

import pytest
import torch

from millrace.core.algorithms.group_advantages import add_overlong_penalty, overlong_penalty
from millrace.core.config.algorithm import Overlong


def test_overlong_penalty_grows_over_the_buffer() -> None:
    found = overlong_penalty(torch.tensor([50, 80, 90, 100, 120]), budget=100, buffer=20, factor=2.0)
    assert found.tolist() == pytest.approx([0, 0, -1, -2, -2])
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(torch.tensor([1]), budget=100, buffer=buffer)


def test_the_buffer_is_a_fifth_of_the_budget_unless_given_and_unscored_samples_stay_unscored() -> None:
    rewards, lengths = torch.tensor([1.0, 1.0, math.nan]), torch.tensor([80, 90, 100])
    shaped = add_overlong_penalty(rewards, lengths, Overlong(), budget=100)
    assert shaped[:2].tolist() == [1.0, 0.5]
    assert math.isnan(shaped[2])
    given = add_overlong_penalty(rewards, lengths, Overlong(buffer_tokens=10), budget=100)
    assert given[:2].tolist() == [1.0, 1.0]
