"""Figures of held-out sets, against their definitions by enumeration."""

from __future__ import annotations

import statistics
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.evaluation import (
    Z_95,
    EvaluatedAnswer,
    by_subset,
    difference,
    figures,
    half_interval,
    majority,
    pass_at_k,
    powers,
)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    draws = list(combinations(correct, k))
    expected = sum(any(draw) for draw in draws) / len(draws)
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 10, 100, 200])
def test_pass_at_k_of_many_samples_is_the_papers_product(k: int) -> None:
    product = 1.0
    for i in range(200 - 10 + 1, 200 + 1):
        product *= 1 - k / i
    assert pass_at_k(200, 10, k) == pytest.approx(1 - product)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0, []), (1, []), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])],
)
def test_which_k_there_are(most: int, expected: list[int]) -> None:
    assert powers(most) == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["4", "4", "5"], 1.0),
        (["5", "5", "4"], 0.0),
        (["4", "5"], 0.5),
        (["4", "5", "6"], 1 / 3),
        (["", ""], 0.0),
        (["", "", "4"], 1.0),  # what found no answer has no vote
        ([None, None, None, "4"], 1.0),
    ],
)
def test_the_majority(texts: list[str | None], expected: float) -> None:
    group = [EvaluatedAnswer("p", float(text == "4"), text) for text in texts]
    assert figures(group, 1.0).majority == pytest.approx(expected)
    assert majority(group, 1.0) == pytest.approx(expected)
    assert majority(group[::-1], 1.0) == pytest.approx(expected)


def test_a_reward_that_names_no_answers_has_no_majority() -> None:
    assert figures([EvaluatedAnswer("p", 1.0, None), EvaluatedAnswer("p", 0.0, None)], 1.0).majority is None
    assert figures([EvaluatedAnswer("p", 0.0, ""), EvaluatedAnswer("p", 0.0, "")], 1.0).majority == 0.0


def test_the_interval_counts_prompts_and_not_their_samples() -> None:
    assert half_interval([[1.0, 1.0]]) is None
    once = [[1.0], [0.0], [1.0], [0.0]]
    deviation = statistics.stdev(value for (value,) in once)
    assert half_interval(once) == pytest.approx(Z_95 * deviation / 2)
    repeated = [group * 16 for group in once]  # sixteen equal samples a prompt say no more than one
    assert half_interval(repeated) == pytest.approx(half_interval(once))


def test_figures_of_a_set_and_of_its_subsets() -> None:
    answers = [
        EvaluatedAnswer("a", 1.0, "4", "easy"),
        EvaluatedAnswer("a", 1.0, "4", "easy"),
        EvaluatedAnswer("b", 0.0, "5", "hard"),
        EvaluatedAnswer("b", 1.0, "6", "hard"),
        EvaluatedAnswer("c", 0.5, "7"),
    ]
    found = figures(answers, 1.0)
    assert (found.answers, found.reward_mean) == (5, pytest.approx(0.7))
    assert found.pass_at == {1: pytest.approx((1 + 0.5 + 0) / 3), 2: 1.0}  # c has one answer
    assert found.majority == pytest.approx((1 + 0.5 + 0) / 3)
    subsets = by_subset(answers, 1.0)
    assert {name: part.reward_mean for name, part in subsets.items()} == {"easy": 1.0, "hard": 0.5}
    assert figures([], 1.0).reward_mean is None
    assert figures(answers[-1:], 0.5).pass_at == {}


REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=4)


@given(st.lists(st.tuples(REWARDS, REWARDS), min_size=2, max_size=8))
def test_a_difference_is_that_of_each_prompts_means(pairs: list[tuple[list[float], list[float]]]) -> None:
    before = {str(n): one for n, (one, _) in enumerate(pairs)} | {"gone": [1.0]}
    after = {str(n): other for n, (_, other) in enumerate(pairs)} | {"new": [0.0]}
    gains = [statistics.fmean(other) - statistics.fmean(one) for one, other in pairs]
    gain, interval = difference(before, after)
    assert gain == pytest.approx(statistics.fmean(gains))
    error = statistics.stdev(gains) / len(gains) ** 0.5
    assert interval == pytest.approx(Z_95 * error, abs=1e-12)


def test_an_equal_gain_on_every_prompt_is_certain_however_hard_they_are() -> None:
    before = {"easy": [0.75, 0.75], "hard": [0.0, 0.25]}
    gain, interval = difference(before, {"easy": [1.0], "hard": [0.375, 0.375]})
    assert (gain, interval) == (0.25, 0.0)
