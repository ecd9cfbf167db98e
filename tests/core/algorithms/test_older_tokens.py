"""Tokens of older policies: decoupled PPO against plain formulas, the age bound, effective sample size, and figures by age."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from millrace.core.algorithms import importance
from millrace.core.algorithms.ages import LAST_AGE, age_metrics, measured, ratio_metrics
from millrace.core.algorithms.aggregate import sample_weights, spread
from millrace.core.algorithms.objective import Objective, derived
from millrace.core.config.algorithm import Algorithm
from millrace.core.contracts.token_batch import TokenBatch

LENGTHS = [4, 3]
MASK = [1, 1, 0, 1, 1, 1, 1]
AGES = [2, 1, 1, 0, 3, 0, 0]
BEHAVIOUR = [-1.0, -2.0, -0.1, -0.7, -1.5, -0.4, -3.0]
PROXIMAL = [-1.4, -0.9, -5.0, -0.7, -0.4, -0.5, -1.0]
NOW = [-1.1, -0.8, -5.0, -0.9, -0.1, -0.9, -1.3]
ADVANTAGES = [0.5, 0.5, 0.5, 0.5, -1.0, -1.0, -1.0]
LOW, HIGH = 0.5, 2.0


def batch(config: Algorithm) -> TokenBatch:
    lengths, mask = torch.tensor(LENGTHS), torch.tensor(MASK)
    counts = torch.tensor([3.0, 3.0], dtype=torch.float64)
    numbers = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    return TokenBatch(
        logprobs=numbers(NOW).requires_grad_(),
        old_logprobs=numbers(PROXIMAL),
        rollout_logprobs=numbers(BEHAVIOUR),
        ref_logprobs=None,
        advantages=numbers(ADVANTAGES),
        mask=mask,
        lengths=lengths,
        weights=spread(sample_weights(counts, config), lengths),
        ages=numbers(AGES),
    )


def plain(kind: str, oldest: int | None) -> tuple[float, list[float]]:
    """Decoupled PPO, token by token: the token mean of c(prox / behave) min(u A, clip(u) A), negated; and its gradient."""
    total, gradient = 0.0, []
    for now, proximal, behaviour, a, on, age in zip(
        NOW, PROXIMAL, BEHAVIOUR, ADVANTAGES, MASK, AGES, strict=True
    ):
        w, u = math.exp(proximal - behaviour), math.exp(now - proximal)
        c = {
            "none": 1.0,
            "truncate": min(max(w, LOW), HIGH),
            "mask": w if LOW <= w <= HIGH else 0.0,
            "icepop": w if LOW <= w <= HIGH else 0.0,
            "reject": float(LOW <= w <= HIGH),
        }[kind]
        if not on or (oldest is not None and age > oldest):
            c = 0.0
        bounded = min(max(u, 0.8), 1.2)
        total -= c * min(u * a, bounded * a)
        gradient.append(-c * u * a if u * a <= bounded * a else 0.0)
    tokens = sum(MASK)
    return total / tokens, [value / tokens for value in gradient]


@pytest.mark.parametrize("oldest", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["none", "truncate", "mask", "icepop", "reject"])
def test_the_loss_is_decoupled_ppo_with_the_chosen_correction(kind: str, oldest: int | None) -> None:
    correction: dict[str, Any] = {"kind": kind, "low": LOW, "high": HIGH, "max_token_age": oldest}
    config = Algorithm(aggregation="token_mean", correction=correction)
    b = batch(config)
    loss, metrics = Objective(config)(b)
    wanted, gradient = plain(kind, oldest)
    assert float(loss.detach()) == pytest.approx(wanted)
    found = torch.autograd.grad(loss, b.logprobs)[0]
    torch.testing.assert_close(found, torch.tensor(gradient, dtype=torch.float64))
    if oldest is not None:
        left_out = [age > oldest for age, on in zip(AGES, MASK, strict=True) if on]
        value, weight = metrics["too_old_share"]
        assert float(value / weight) == pytest.approx(sum(left_out) / sum(MASK))


def test_with_the_bound_the_denominator_still_counts_what_it_leaves_out() -> None:
    config = Algorithm(aggregation="sequence_mean", correction={"max_token_age": 0})
    b = batch(config)
    loss, metrics = Objective(config)(b)
    loss.backward()
    u = [math.exp(now - proximal) for now, proximal in zip(NOW, PROXIMAL, strict=True)]
    first, second = u[3] * 0.5 / 3, -(max(u[5], 0.8) + max(u[6], 0.8)) / 3
    assert float(loss.detach()) == pytest.approx(-(first + second) / 2)
    assert b.logprobs.grad is not None
    assert b.logprobs.grad[[0, 1, 2, 4]].tolist() == [0, 0, 0, 0]
    assert float(metrics["pg_loss"][1]) == pytest.approx(float(b.weights.sum() - b.weights[2]))


def test_no_term_of_the_loss_has_a_token_that_is_too_old() -> None:
    config = Algorithm(
        kl_coef=0.1, entropy_coef=0.1, aggregation="token_mean", correction={"max_token_age": 0}
    )
    b = batch(config)
    b.ref_logprobs, b.entropy = torch.full_like(b.old_logprobs, -1.0), b.logprobs * -1.0
    loss, _ = Objective(config)(b)
    gradient = torch.autograd.grad(loss, b.logprobs)[0]
    assert [value == 0 for value in gradient.tolist()] == [True, True, True, False, True, False, False]


def test_a_users_loss_sees_the_ages_and_the_bound_holds_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_loss", sys.modules[__name__])
    config = Algorithm(
        loss={"kind": "function", "function": "my_loss:by_age"},
        aggregation="token_mean",
        correction={"max_token_age": 1},
    )
    loss, _ = Objective(config)(batch(config))
    assert float(loss.detach()) == pytest.approx(
        (1 + 0 + 0 + 0) / 6
    )  # ages 1, 0, 0, 0; those of 2 and 3 are left out


def by_age(b: TokenBatch) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The age of each token as its loss."""
    assert b.ages is not None
    return b.ages, {}


def test_a_batch_without_ages_has_none_above_zero() -> None:
    config = Algorithm(correction={"kind": "truncate", "max_token_age": 0})
    b = batch(config)
    b.ages = None
    free = Objective(Algorithm(correction={"kind": "truncate"}))(b)[0]
    torch.testing.assert_close(Objective(config)(b)[0], free)


@given(
    st.lists(st.floats(-4, 4), min_size=1, max_size=12),
    st.sampled_from(["none", "truncate", "mask", "reject"]),
)
def test_ess_is_the_share_of_tokens_that_the_weights_amount_to(gaps: list[float], kind: Any) -> None:
    config = Algorithm(
        aggregation="token_mean", correction={"kind": kind, "low": LOW, "high": HIGH, "level": "token"}
    )
    old = torch.full((len(gaps),), -5.0, dtype=torch.float64)
    mask, lengths = torch.ones(len(gaps)), torch.tensor([len(gaps)])
    b = TokenBatch(
        old, old, old - torch.tensor(gaps, dtype=torch.float64), None, old, mask, lengths, mask / len(gaps)
    )
    _, sums = Objective(config)(b)
    ess = derived({name: float(value / weight) for name, (value, weight) in sums.items()})["ess"]
    factor = importance.correct(torch.tensor(gaps, dtype=torch.float64), config.correction)
    if not factor.any():
        assert ess == 0
        return
    assert ess == pytest.approx(float(factor.sum() ** 2 / factor.square().sum()) / len(gaps))
    assert 1 / len(gaps) - 1e-9 <= ess <= 1 + 1e-9


def figures(pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    return {
        name: float(value / weight) if weight else float(value) for name, (value, weight) in pairs.items()
    }


def numbers(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_both_ratios_and_the_figures_by_age() -> None:
    mask, ages = torch.tensor(MASK), numbers(AGES)
    found = figures(
        age_metrics(ages, mask) | ratio_metrics(numbers(PROXIMAL), numbers(BEHAVIOUR), mask, ages, 3)
    )
    gaps = [p - b for p, b, on in zip(PROXIMAL, BEHAVIOUR, MASK, strict=True) if on]
    old = [age for age, on in zip(AGES, MASK, strict=True) if on]
    same = [gap for gap, age in zip(gaps, old, strict=True) if age == 0]
    older = [gap for gap, age in zip(gaps, old, strict=True) if age > 0]
    assert found["staleness_mean"] == pytest.approx(sum(old) / len(old))
    assert found["logprob_gap_share"] == found["share_age_0"] == pytest.approx(0.5)
    for ratio, kl, of in (
        ("mismatch_ratio", "mismatch_kl", same),
        ("staleness_ratio", "behaviour_kl", older),
    ):
        assert found[ratio] == pytest.approx(sum(math.exp(gap) for gap in of) / len(of))
        assert found[kl] == pytest.approx(sum(math.exp(gap) - 1 - gap for gap in of) / len(of))
    for age in range(4):
        of = [abs(gap) for gap, each in zip(gaps, old, strict=True) if each == age]
        assert found[f"share_age_{age}"] == pytest.approx(len(of) / len(gaps))
        assert found[f"logprob_gap_age_{age}"] == pytest.approx(sum(of) / len(of))
    assert "share_age_4" not in found


def test_ages_from_the_last_on_have_one_figure() -> None:
    ages = numbers([0, LAST_AGE, LAST_AGE + 3])
    gap = numbers([0, 1, 3])
    found = figures(ratio_metrics(gap, gap * 0, torch.ones(3), ages, LAST_AGE + 3))
    assert found[f"share_age_{LAST_AGE}"] == pytest.approx(2 / 3)
    assert found[f"logprob_gap_age_{LAST_AGE}"] == pytest.approx(2)
    assert sum(share for name, share in found.items() if name.startswith("share_age_")) == pytest.approx(1)


def test_what_no_token_measured_is_not_reported() -> None:
    mask, ages = torch.ones(2), numbers([1, 3])
    found = measured(figures(ratio_metrics(numbers([-1, -2]), numbers([-2, -2]), mask, ages, 3)))
    assert not {"mismatch_ratio", "mismatch_kl", "logprob_gap_age_0", "logprob_gap_age_2"} & set(found)
    assert {"staleness_ratio", "behaviour_kl", "logprob_gap_age_1", "logprob_gap_age_3"} <= set(found)
    fresh = measured(figures(ratio_metrics(numbers([-1, -2]), numbers([-2, -2]), mask, ages * 0, 1)))
    assert {"mismatch_ratio", "mismatch_kl", "logprob_gap_age_0"} <= set(fresh)
    assert not {"staleness_ratio", "behaviour_kl", "logprob_gap_age_1"} & set(fresh)


def test_figures_by_age_are_exact_under_any_split() -> None:
    torch.manual_seed(0)
    ages, mask = torch.randint(0, 7, (40,)).double(), torch.rand(40) > 0.3
    ours, theirs = -torch.rand(40, dtype=torch.float64), -torch.rand(40, dtype=torch.float64)

    def of(part: slice) -> dict[str, tuple[Tensor, Tensor]]:
        ratios = ratio_metrics(ours[part], theirs[part], mask[part], ages[part], 6)
        return ratios | age_metrics(ages[part], mask[part])

    whole, parts = of(slice(None)), [of(slice(0, 13)), of(slice(13, 13)), of(slice(13, 40))]
    for name, pair in whole.items():
        for number, value in enumerate(pair):
            torch.testing.assert_close(sum(part[name][number] for part in parts), value, msg=name)
