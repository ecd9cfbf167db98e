"""Verifiers: what counts as right, and what is the data's fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.core.errors import ConfigError
from millrace.core.hooks import RewardInput, RewardResult
from millrace.core.rewards import format, math, number, scoring, text


def sample(response: str, label: Any = None, **more: Any) -> RewardInput:
    return RewardInput(prompt="?", response=response, label=label, **more)


def test_exact_match_and_contains() -> None:
    assert text.exact_match(sample(" yes\n", "yes")) == 1
    assert text.exact_match(sample(" yes", "yes"), strip=False) == 0
    assert text.exact_match(sample("Yes", "yes"), ignore_case=True) == 1
    assert text.exact_match(sample("7", 7)) == 1
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
    assert number.arithmetic(sample(response, label)) == expected


def test_arithmetic_tolerance_and_bad_labels() -> None:
    assert number.arithmetic(sample("3.14", 3.1416), tolerance=0.01) == 1
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
    assert math.math(sample(response, label)) == expected


def test_math_options_and_bad_labels() -> None:
    assert math.math(sample("it is 17", 17), boxed_only=True) == 0
    assert math.math(sample("17</think>18", 18), after="</think>") == 1
    assert math.math(sample("18", 18), after="</think>") == 0
    assert math.math(sample(r"\boxed{1+x}", "x+1"), symbolic=False) == 0
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
    assert found == RewardResult(1.5, {"right": 1.0, "form": 1.0})


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


def named(sample: RewardInput) -> dict[str, float]:
    """A reward and its parts by name."""
    return {"right": 1.0, "length": -0.5, "reward": 0.5}


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
    }
    assert scoring.score_sample("my_rewards:slow", {"add": 1}, ROW) == {
        "reward": 2.0,
        "parts": {"length": 1.0},
    }
    with pytest.raises(ValueError, match="finite"):
        scoring.score_sample("my_rewards:nan", {}, ROW)
    with pytest.raises(TypeError, match="return a number"):
        scoring.score_sample("my_rewards:words", {}, ROW)
    assert scoring.score_sample("my_rewards:named", {}, ROW) == {
        "reward": 0.5,
        "parts": {"right": 1.0, "length": -0.5},
    }
    with pytest.raises(TypeError, match=r"without the key reward, only \['right'\]"):
        scoring.score_sample("my_rewards:parts_alone", {}, ROW)
    with pytest.raises(ConfigError, match=r"reward\.function"):
        scoring.score_sample("my_rewards:none", {}, ROW)


def test_scoring_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, millrace.core.rewards.scoring, millrace.core.rewards.format, millrace.core.group_filters, millrace.core.hooks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
