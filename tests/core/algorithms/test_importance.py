"""Sampler/trainer correction: levels, bounds, rejection and metrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.algorithms import importance
from millrace.core.algorithms.objective import derived
from millrace.core.config.algorithm import Correction

OLD = torch.tensor([-1.0, -2.0, math.nan, -0.5, -3.0])
ROLLOUT = torch.tensor([-1.5, -1.0, -9.0, -0.5, -5.0])
MASK = torch.tensor([1, 1, 0, 1, 1])
LENGTHS = torch.tensor([3, 2])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.5, -1.0, 0.0, 0.0, 2.0]),
        ("sequence_product", [-0.5, -0.5, 0.0, 2.0, 2.0]),
        ("sequence_geometric", [-0.25, -0.25, 0.0, 1.0, 1.0]),
    ],
)
def test_levels(level: str, expected: list[float]) -> None:
    found = importance.log_weights(OLD, ROLLOUT, MASK, LENGTHS, level=level)
    torch.testing.assert_close(found, torch.tensor(expected))
    assert not found.requires_grad


def test_weights_stay_finite_over_long_sequences() -> None:
    n = 5000
    gap = importance.log_weights(
        torch.zeros(n), torch.full((n,), -1.0), torch.ones(n), torch.tensor([n]), level="sequence_product"
    )
    assert bool(torch.isfinite(gap.exp()).all())


def test_kinds() -> None:
    w = torch.tensor([0.1, 0.5, 1.0, 2.0, 7.0])
    assert importance.truncate(w, high=2.0).tolist() == pytest.approx([0.1, 0.5, 1, 2, 2])
    assert importance.truncate(w, low=0.5, high=2.0).tolist() == [0.5, 0.5, 1, 2, 2]
    assert importance.mask_outside(w, high=2.0).tolist() == pytest.approx([0.1, 0.5, 1, 2, 0])
    assert importance.mask_outside(w, low=0.5, high=5.0).tolist() == [0, 0.5, 1, 2, 0]
    assert importance.reject(w, low=0.5, high=2.0).tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("kind", ["none", "truncate", "mask", "icepop", "reject"])
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_no_gap_changes_nothing_and_weights_stay_in_bounds(kind: str, gaps: list[float]) -> None:
    correction = Correction(kind=kind, low=0.5, high=5)
    assert importance.correct(torch.zeros(3), correction).tolist() == [1, 1, 1]
    found = importance.correct(torch.tensor(gaps, dtype=torch.float64), correction)
    assert all(f == 0 or 0.5 <= f <= 5 for f in found.tolist())


def test_veto_leaves_out_whole_samples() -> None:
    assert importance.veto(OLD, ROLLOUT, MASK, LENGTHS, lowest=0.5).tolist() == [0, 0, 0, 1, 1]
    assert importance.veto(OLD, ROLLOUT, MASK, LENGTHS, lowest=0.3).tolist() == [1, 1, 1, 1, 1]


def test_opsm_leaves_out_negative_tokens_of_drifted_samples() -> None:
    now = torch.tensor([-2.0, -2.0, -3.0, -1.0, -1.0])
    then = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    a = torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0])
    found = importance.opsm(now, then, a, torch.ones(5), LENGTHS, delta=0.5)
    assert found.tolist() == [0, 1, 0, 1, 1]  # the second sample has not drifted
    masked = importance.opsm(now, then, a, torch.tensor([1, 1, 0, 1, 1]), LENGTHS, delta=1.2)
    assert masked.tolist() == [1, 1, 1, 1, 1]  # without the third token the mean drift is 1


def test_metrics_are_exact_under_any_split() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([4, 1, 6, 3])
    n = int(lengths.sum())
    old, rollout = -torch.rand(n, dtype=torch.float64), -torch.rand(n, dtype=torch.float64)
    mask = (torch.rand(n) > 0.3).long()
    correction = Correction(low=0.7, high=1.4, level="sequence_geometric")
    whole = importance.metrics(old, rollout, mask, lengths, correction)
    parts = []
    for first, last, rows in ((0, 5, slice(0, 2)), (5, n, slice(2, 4))):
        parts.append(
            importance.metrics(
                old[first:last], rollout[first:last], mask[first:last], lengths[rows], correction
            )
        )
    for name, (total, weight) in whole.items():
        torch.testing.assert_close(sum(part[name][0] for part in parts), total)
        assert sum(float(part[name][1]) for part in parts) == float(weight)


def test_metrics_mean_what_they_say() -> None:
    found = importance.metrics(OLD, ROLLOUT, MASK, LENGTHS, Correction(low=0.5, high=2.0))
    means = derived({name: float(total / weight) for name, (total, weight) in found.items()})
    w = [math.exp(g) for g in (0.5, -1.0, 0.0, 2.0)]
    mean = sum(w) / 4
    assert means["importance_mean"] == pytest.approx(mean)
    assert means["importance_std"] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in w) / 4))
    assert means["importance_ess"] == pytest.approx(sum(w) ** 2 / (4 * sum(x * x for x in w)))
    assert means["importance_out_of_band"] == 0.5
    assert means["sampler_gap"] == pytest.approx((0.5 + 1 + 0 + 2) / 4)
    assert means["sampler_k1"] == pytest.approx((-0.5 + 1 + 0 - 2) / 4)
    assert means["sampler_k3"] == pytest.approx(sum(x - 1 - math.log(x) for x in w) / 4)


@pytest.mark.parametrize("near", [0.0, -8.0], ids=["one", "zero"])
def test_the_spread_of_weights_near_one_or_zero_is_not_lost_in_rounding(near: float) -> None:
    """The second moment less the squared mean is a difference of numbers that fp32 cannot tell apart, about 1 if not about 0."""
    gaps = near + torch.linspace(-3e-7, 3e-7, 500) * (1 if near == 0 else 1e6)
    found = importance.metrics(
        -2 + gaps, torch.full((500,), -2.0), torch.ones(500), torch.tensor([500]), Correction()
    )
    means = derived({name: float(total / weight) for name, (total, weight) in found.items()})
    stored = [math.exp(float(gap)) for gap in (-2 + gaps).double() + 2]
    middle = math.fsum(stored) / 500
    spread = math.sqrt(math.fsum((value - middle) ** 2 for value in stored) / 500)
    assert means["importance_std"] == pytest.approx(spread, rel=0.3)


def test_equal_log_probs_have_effective_sample_size_one() -> None:
    same = torch.tensor([-1.0, -2.0])
    found = importance.metrics(same, same, torch.ones(2), torch.tensor([2]), Correction())
    means = derived({name: float(total / weight) for name, (total, weight) in found.items()})
    assert means["importance_ess"] == 1.0
    assert means["importance_std"] == 0.0
    assert means["sampler_k3"] == 0.0
