"""Rewards by comparison in pairs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.algorithms import tournament


class Judge:
    """Prefers the larger strength; counts what it was asked."""

    def __init__(self, strengths: Sequence[float]) -> None:
        self.strengths, self.rounds, self.comparisons = strengths, 0, 0

    def __call__(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        self.rounds += 1
        self.comparisons += len(pairs)
        s = self.strengths
        return [0.5 if s[a] == s[b] else float(s[a] > s[b]) for a, b in pairs]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9))
def test_round_robin_is_the_mean_score_and_averages_one_half(strengths: list[int]) -> None:
    judge = Judge(strengths)
    found = tournament.round_robin(len(strengths), judge)
    expected = [
        sum(1.0 if s > o else 0.5 if s == o else 0.0 for j, o in enumerate(strengths) if j != i)
        / (len(strengths) - 1)
        for i, s in enumerate(strengths)
    ]
    assert found.tolist() == pytest.approx(expected)
    assert float(found.mean()) == pytest.approx(0.5)
    assert (judge.rounds, judge.comparisons) == (1, len(strengths) * (len(strengths) - 1) // 2)


@given(st.permutations(range(9)), st.integers(2, 9))
def test_single_elimination_crowns_the_best_in_n_minus_1_comparisons(order: list[int], n: int) -> None:
    strengths = [float(x) for x in order[:n]]
    judge = Judge(strengths)
    found = tournament.single_elimination(torch.zeros(n), judge)
    assert int(found.argmax()) == max(range(n), key=lambda i: strengths[i])
    assert float(found.max()) == 1.0
    assert float(found.mean()) == pytest.approx(0.5)
    assert bool(((found >= 0) & (found <= 1)).all())
    assert judge.comparisons == n - 1
    assert judge.rounds == (n - 1).bit_length()


def test_true_seeds_put_the_two_best_into_the_final() -> None:
    strengths = [3.0, 8.0, 1.0, 6.0, 7.0, 2.0, 5.0, 4.0]
    found = tournament.single_elimination(torch.tensor(strengths), Judge(strengths))
    assert found[[1, 4]].tolist() == [1.0, pytest.approx(1 - 1 / 7)]
    assert found[[3, 6]].tolist() == pytest.approx([1 - 2.5 / 7] * 2)  # the other two of the best four
    assert found[[0, 2, 5, 7]].tolist() == pytest.approx([1 - 5.5 / 7] * 4)


def test_a_level_comparison_goes_to_the_stronger_seed() -> None:
    found = tournament.single_elimination(torch.tensor([0.1, 0.9]), lambda pairs: [0.5] * len(pairs))
    assert found.tolist() == [0.0, 1.0]


def test_bad_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="one score"):
        tournament.round_robin(3, lambda pairs: [1.0])
    with pytest.raises(ValueError, match="one score"):
        tournament.single_elimination(torch.zeros(2), lambda pairs: [2.0])
    with pytest.raises(ValueError, match="at least two"):
        tournament.round_robin(1, lambda pairs: [])
