"""Advantage estimators against float64 brute force, and the properties that make their bugs visible."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from millrace.core.algorithms import group_advantages as advantages
from millrace.core.config.algorithm import Algorithm
from millrace.core.errors import DataError

reward = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))
groups = st.lists(st.lists(reward, min_size=2, max_size=8), min_size=1, max_size=6)


def packed(parts: list[list[float]]) -> tuple[Tensor, Tensor]:
    rewards = torch.tensor([r for part in parts for r in part], dtype=torch.float64)
    ids = torch.tensor([17 * number + 3 for number, part in enumerate(parts) for _ in part])
    return rewards, ids


def by_hand(part: list[float], epsilon: float = 1e-6) -> list[float]:
    if max(part) == min(part):
        return [0.0] * len(part)
    mean, std = statistics.fmean(part), statistics.stdev(part)
    return [(r - mean) / (std + epsilon) for r in part]


@given(groups)
def test_group_relative_is_each_group_by_itself_in_float64(parts: list[list[float]]) -> None:
    rewards, ids = packed(parts)
    expected = torch.tensor([a for part in parts for a in by_hand(part)], dtype=torch.float64)
    torch.testing.assert_close(advantages.group_relative(rewards, ids), expected, rtol=1e-7, atol=1e-9)


@given(groups, st.randoms(use_true_random=False))
def test_group_relative_does_not_depend_on_the_order_of_samples(parts, random) -> None:  # type: ignore[no-untyped-def]
    rewards, ids = packed(parts)
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = advantages.group_relative(rewards[order], ids[order])
    torch.testing.assert_close(
        shuffled, advantages.group_relative(rewards, ids)[order], rtol=1e-9, atol=1e-12
    )


@given(groups, st.floats(-100, 100), st.booleans())
def test_group_relative_is_shift_invariant(parts: list[list[float]], shift: float, std: bool) -> None:
    rewards, ids = packed(parts)
    plain = advantages.group_relative(rewards, ids, divide_by_std=std)
    moved = advantages.group_relative(rewards + shift, ids, divide_by_std=std)
    torch.testing.assert_close(moved, plain, rtol=1e-4, atol=1e-6)


@given(groups, st.sampled_from(["group_relative", "leave_one_out", "no_std", "max_rl"]))
def test_advantages_of_a_group_sum_to_zero(parts: list[list[float]], estimator: str) -> None:
    if estimator == "max_rl":
        parts = [[abs(r) for r in part] for part in parts]
    rewards, ids = packed(parts)
    if estimator == "no_std":
        found = advantages.group_relative(rewards, ids, divide_by_std=False)
    else:
        found = getattr(advantages, estimator)(rewards, ids)
    for number in ids.unique():
        inside = found[ids == number]
        assert abs(float(inside.sum())) <= 1e-9 * max(1.0, float(inside.abs().sum()))


@given(groups)
def test_leave_one_out_subtracts_the_mean_of_the_others(parts: list[list[float]]) -> None:
    rewards, ids = packed(parts)
    expected = [r - (sum(part) - r) / (len(part) - 1) for part in parts for r in part]
    torch.testing.assert_close(
        advantages.leave_one_out(rewards, ids),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e8, -0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_variance_gives_exact_zeros(value: float, dtype: torch.dtype) -> None:
    rewards = torch.full((7,), value, dtype=dtype)
    ids = torch.zeros(7, dtype=torch.long)
    for found in (
        advantages.group_relative(rewards, ids),
        advantages.group_relative(rewards, ids, divide_by_std=False),
        advantages.leave_one_out(rewards, ids),
        advantages.max_rl(rewards.abs(), ids),
    ):
        assert torch.equal(found, torch.zeros(7, dtype=dtype))


def test_null_rewards_leave_the_statistics_and_get_zero() -> None:
    rewards = torch.tensor([1.0, math.nan, 0.0, 0.0, math.nan, 5.0, math.nan])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    for estimator in (advantages.group_relative, advantages.leave_one_out, advantages.max_rl):
        found = estimator(rewards, ids)
        kept = estimator(rewards[[0, 2, 3]], ids[[0, 2, 3]])
        torch.testing.assert_close(found[[0, 2, 3]], kept)
        assert torch.equal(found[[1, 4, 5, 6]], torch.zeros(4))  # 5 is alone with a null: nothing to compare


def test_a_group_of_one_gives_zero() -> None:
    for estimator in (advantages.group_relative, advantages.leave_one_out, advantages.max_rl):
        assert torch.equal(estimator(torch.tensor([3.0]), torch.tensor([4])), torch.zeros(1))


def test_an_empty_batch_gives_empty_advantages() -> None:
    none = torch.zeros(0)
    assert advantages.group_relative(none, torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_max_rl_refuses_negative_rewards() -> None:
    with pytest.raises(DataError, match="not negative"):
        advantages.max_rl(torch.tensor([1.0, -0.5]), torch.tensor([0, 0]))


def test_group_statistics_refuse_other_shapes() -> None:
    with pytest.raises(ValueError, match="must both be"):
        advantages.group_relative(torch.zeros(3), torch.zeros(2))


def test_the_configured_estimator_is_used() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 1, 1])
    use = lambda **fields: advantages.group_advantages(rewards, ids, Algorithm(**fields))  # noqa: E731
    assert torch.equal(use(), advantages.group_relative(rewards, ids))
    assert use(preset="dr_grpo").tolist() == [0.5, -0.5, -1.5, 1.5]
    assert use(preset="rloo").tolist() == [1, -1, -3, 3]
    assert use(preset="max_rl").tolist() == [1, -1, -1, 1]
    assert use(preset="reinforce_plus_plus_baseline").tolist() == [0.5, -0.5, -1.5, 1.5]
    assert use(preset="opd").tolist() == [0, 0, 0, 0]
    assert use(preset="ppo") is None
    assert use(preset="reinforce_plus_plus") is None
