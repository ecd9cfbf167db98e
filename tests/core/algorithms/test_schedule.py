"""KL controllers, penalties and schedules."""

from __future__ import annotations

import math

import pytest
import torch

from millrace.core.algorithms import schedule
from millrace.core.config.algorithm import Algorithm


def test_adaptive_coefficient_moves_towards_the_target_and_survives_a_restart() -> None:
    config = Algorithm(kl_coef=0.1, kl_target=0.05, kl_horizon=100)
    controller = schedule.KLController(config)
    assert controller.update(1.0, 50) == pytest.approx(0.11)  # too far: error clipped at +0.2
    assert controller.update(0.0, 50) == pytest.approx(0.099)
    assert controller.update(0.05, 50) == pytest.approx(0.099)
    again = schedule.KLController(config)
    again.restore(controller.state())
    assert again.value == controller.value


def test_fixed_coefficient_stays() -> None:
    controller = schedule.KLController(Algorithm(kl_coef=0.1))
    assert controller.update(9.0, 100) == 0.1
    controller.restore({"kl_coef": 5.0})
    assert controller.value == 0.1


def test_linear_schedule_stays_at_its_ends() -> None:
    assert [schedule.linear(0.2, 0.4, step=s, steps=4) for s in (-1, 0, 1, 4, 9)] == pytest.approx(
        [0.2, 0.2, 0.25, 0.4, 0.4]
    )
    assert schedule.linear(0.2, 0.4, step=0, steps=0) == 0.4


def test_overlong_penalty_grows_over_the_buffer() -> None:
    found = schedule.overlong_penalty(torch.tensor([50, 80, 90, 100, 120]), budget=100, buffer=20, factor=2.0)
    assert found.tolist() == pytest.approx([0, 0, -1, -2, -2])
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="buffer"):
            schedule.overlong_penalty(torch.tensor([1]), budget=100, buffer=buffer)


def test_length_penalty_favours_short_right_answers_and_never_rewards_wrong_ones() -> None:
    found = schedule.length_penalty(torch.tensor([10, 20, 30, 10]), torch.tensor([1.0, 1, 1, 0]), factor=2.0)
    assert found.tolist() == [1, 0, -1, 0]
    assert schedule.length_penalty(torch.tensor([5, 5]), torch.tensor([1.0, 0]), factor=1.0).tolist() == [
        0,
        0,
    ]


def shaping(rewards: torch.Tensor, lengths: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
    """Nothing for the truncated."""
    return torch.where(truncated, 0.0, rewards)


def test_shaping_composes_penalty_and_hook_and_keeps_nulls(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_shaping", sys.modules[__name__])
    rewards, lengths = torch.tensor([1.0, 1.0, math.nan]), torch.tensor([80, 90, 100])
    truncated = torch.tensor([True, False, False])
    plain = schedule.shape_rewards(rewards, lengths, truncated, Algorithm(), budget=100)
    assert torch.equal(plain.nan_to_num(7), rewards.nan_to_num(7))
    config = Algorithm(preset="dapo", shaping_function="my_shaping:shaping")  # buffer: a fifth of the budget
    found = schedule.shape_rewards(rewards, lengths, truncated, config, budget=100)
    assert found[:2].tolist() == [0.0, 0.5]
    assert math.isnan(found[2])
