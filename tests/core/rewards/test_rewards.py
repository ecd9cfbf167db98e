"""Verifiers: what counts as right, and what is the data's fault."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards import format, math, number, scoring, text
from millrace.core.rewards.hub.dapo import dapo
from millrace.core.rewards.hub.deepscaler import deepscaler


def sample(response: str, label: Any = None, **more: Any) -> RewardInput:
    return RewardInput(prompt="?", response=response, label=label, **more)


def test_exact_match_and_contains() -> None:
    assert text.exact_match(sample(" yes\n", "yes")).reward == 1
    assert text.exact_match(sample(" yes", "yes"), strip=False).reward == 0
    assert text.exact_match(sample("Yes", "yes"), ignore_case=True).reward == 1
    assert text.exact_match(sample("7", 7)).reward == 1
    assert text.contains(sample("it is 42.", 42)) == 1
    assert text.contains(sample("it is", None)) == 0
    assert text.contains(sample("ABC", "b"), ignore_case=True) == 1


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("12", 12, 1),
        ("The answer is 12.", "12", 1),
        ("3+4=7", 7, 1),
        ("7-3", 3, 1),
        ("x = -3", -3, 1),
        ("5 - -3", -3, 1),
        ("1,234", 1234, 1),
        ("1.50", "1.5", 1),
        ("1e3", 1000, 1),
        ("12 or 13", 12, 0),
        ("none", 12, 0),
        ("", 12, 0),
        ("9" * 5000, 9, 0),
        ("0.1", 0.1, 1),
    ],
)
def test_arithmetic_takes_the_last_number(response: str, label: Any, expected: int) -> None:
    assert number.arithmetic(sample(response, label)).reward == expected


def test_arithmetic_tolerance_and_bad_labels() -> None:
    assert number.arithmetic(sample("3.14", 3.1416), tolerance=0.01).reward == 1
    with pytest.raises(ValueError, match="not a number"):
        number.arithmetic(sample("3", "three"))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {a}", "a"),
        (r"\boxed{open", None),
        (r"\boxed{whole} \boxed{open", "whole"),
        ("42", None),
    ],
)
def test_last_boxed(response: str, expected: str | None) -> None:
    assert math.last_boxed(response) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"\boxed{42}", "42", 1),
        (r"\boxed{42}", r"\boxed{42}", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1),
        (r"\boxed{2/4}", "1/2", 1),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{x + 1}", "x+1", 1),
        (r"\boxed{1+x}", "x+1", 1),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1),
        ("the answer is 17", 17, 1),
        (r"17 \boxed{18}", 17, 0),
        (r"\boxed{\frac{1}{0}}", "1", 0),
        (r"\boxed{}", "1", 0),
        (r"\boxed{" + "x" * 5000 + "}", "1", 0),
        ("", 1, 0),
    ],
)
def test_math(response: str, label: Any, expected: int) -> None:
    assert math.math(sample(response, label)).reward == expected


def test_math_options_and_bad_labels() -> None:
    assert math.math(sample("it is 17", 17), boxed_only=True).reward == 0
    assert math.math(sample("17</think>18", 18), after="</think>").reward == 1
    assert math.math(sample("18", 18), after="</think>").reward == 0
    assert math.math(sample(r"\boxed{1+x}", "x+1"), symbolic=False).reward == 0
    with pytest.raises(ValueError, match="empty"):
        math.math(sample("1", ""))


def test_forms() -> None:
    good = "<think>so</think>\n<answer>1</answer>"
    assert format.think_answer(sample(good)) == 1
    for bad in (good + "x", "<think>so</think>", good + good, "<think>a<think>b</think><answer>1</answer>"):
        assert format.think_answer(sample(bad)) == 0
    assert format.boxed(sample(r"\boxed{1}")) == 1
    assert format.boxed(sample(r"\boxed{}")) == 0
    assert format.matches(sample("abc"), pattern="b") == 1
    assert format.matches(sample("abc"), pattern="b", whole=True) == 0
    assert format.finished(sample("", status="truncated")) == 0


def test_weighted_rewards_keep_their_parts() -> None:
    parts = {
        "right": {"function": "millrace.core.rewards.number:arithmetic"},
        "form": {
            "function": "millrace.core.rewards.format:matches",
            "weight": 0.5,
            "options": {"pattern": "="},
        },
    }
    found = format.weighted(sample("3+4=7", 7), parts=parts)
    assert found == RewardResult(1.5, {"right": 1.0, "form": 1.0}, "7")


ROW = {
    "prompt": json.dumps([{"role": "user", "content": "3+4"}]),
    "response": "7",
    "label": "7",
    "metadata": None,
    "response_length": 1,
    "status": "completed",
}


async def slow(sample: RewardInput, *, add: float = 0) -> RewardResult:
    """An async reward."""
    return RewardResult(1 + add, {"length": sample.response_length})


def nan(sample: RewardInput) -> float:
    """No reward."""
    return float("nan")


def named(sample: RewardInput) -> dict[str, float | str]:
    """A reward and its parts by name."""
    return {"right": 1.0, "length": -0.5, "why": "short", "answer": "7", "reward": 0.5}


def parts_alone(sample: RewardInput) -> dict[str, float]:
    """Parts of no reward."""
    return {"right": 1.0}


def words(sample: RewardInput) -> Any:
    """No number."""
    return "1"


def test_scoring_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_rewards", sys.modules[__name__])
    assert scoring.score_sample("millrace.core.rewards.number:arithmetic", {}, ROW) == {
        "reward": 1.0,
        "parts": {},
        "answer": "7",
    }
    assert scoring.score_sample("my_rewards:slow", {"add": 1}, ROW) == {
        "reward": 2.0,
        "parts": {"length": 1.0},
        "answer": None,
    }
    with pytest.raises(ValueError, match="finite"):
        scoring.score_sample("my_rewards:nan", {}, ROW)
    with pytest.raises(TypeError, match="return a number"):
        scoring.score_sample("my_rewards:words", {}, ROW)
    assert scoring.score_sample("my_rewards:named", {}, ROW) == {
        "reward": 0.5,
        "parts": {"right": 1.0, "length": -0.5, "why": "short"},
        "answer": "7",
    }
    with pytest.raises(TypeError, match=r"without the key reward, only \['right'\]"):
        scoring.score_sample("my_rewards:parts_alone", {}, ROW)
    with pytest.raises(ConfigError, match=r"reward\.function"):
        scoring.score_sample("my_rewards:none", {}, ROW)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (numpy.float32(0.5), 0.5),
        (numpy.int64(2), 2.0),
        (numpy.bool_(True), 1.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([0.25], requires_grad=True), 0.25),
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        ({"reward": numpy.float64(1), "acc": True}, 1.0),
    ],
)
def test_what_is_one_number_is_a_reward(answer: Any, reward: float) -> None:
    assert scoring.read_score(answer, "mine:score").reward == reward


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "returned reward of type NoneType; return a number"),
        ([1.0], "returned reward of type list; return a number"),
        (1j, "returned reward of type complex"),
        (numpy.array([0.5, 1]), "returned reward of type ndarray, which is no one number"),
        (torch.tensor([0.5, 1]), "returned reward of type Tensor, which is no one number"),
        (10**400, "returned reward of type int, which is no one number"),
        (numpy.float32("nan"), "returned reward = nan; a reward is a finite number"),
        (torch.tensor(float("inf")), "returned reward = inf"),
        ({"reward": 1, "why": ["right"]}, "returned part why of type list"),
        (RewardResult(1.0, answer=5), "returned an answer of type int"),
        ({"reward": 1, "each": {"a": 1}}, "returned part each of type dict"),
        ({"reward": 1, "length": float("nan")}, "returned part length = nan"),
        ({"reward": None}, "returned reward of type NoneType"),
        ((each for each in [1.0]), "returned reward of type generator"),
    ],
)
def test_what_is_no_number_is_named(answer: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"mine:score {said}"):
        scoring.read_score(answer, "mine:score")


@pytest.mark.parametrize(
    "answers", [numpy.array([0.5, 1.0]), torch.tensor([0.5, 1.0]), (0.5, numpy.float32(1))]
)
def test_scores_of_a_group_may_be_an_array(answers: Any) -> None:
    assert [each.reward for each in scoring.read_group(answers, 2, "mine:rank")] == [0.5, 1.0]


@pytest.mark.parametrize("label", [{"answer": "4"}, ["4"]])
@pytest.mark.parametrize(
    "reward",
    [text.exact_match, text.contains, math.math, deepscaler, dapo],
    ids=lambda reward: reward.__name__,
)
def test_a_label_that_is_no_text_is_the_datas_fault(reward: Any, label: Any) -> None:
    """Every answer was wrong then, and the run went on with rewards of 0."""
    with pytest.raises(DataError, match=rf"label of the row: it is a {type(label).__name__}") as caught:
        reward(sample("4", label))
    assert "label_key" in str(caught.value.remedy)


def test_scoring_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, millrace.core.rewards.scoring, millrace.core.rewards.format, millrace.core.hooks.group_filters, millrace.core.hooks.loading; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
