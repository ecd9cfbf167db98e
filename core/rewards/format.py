"""Rewards for the form of a response, and rewards composed of others. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.hooks.reward_forms import bound
from millrace.core.rewards.math import last_boxed
from millrace.core.rewards.scoring import read_score

THINK_ANSWER = re.compile(
    r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL
)


def think_answer(sample: RewardInput) -> float:
    """1 if the response is <think>...</think><answer>...</answer> with nothing around it and each tag once, else 0."""
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    # first, since the expression is slow on many tags
    once = all(sample.response.count(tag) == 1 for tag in tags)
    return float(once and THINK_ANSWER.fullmatch(sample.response) is not None)


def boxed(sample: RewardInput) -> float:
    """1 if the response holds a whole \\boxed{...} that is not empty, else 0."""
    return float(bool(last_boxed(sample.response)))


def matches(sample: RewardInput, *, pattern: str, whole: bool = False) -> float:
    """1 if the regular expression is found in the response (`whole`: matches all of it), else 0."""
    find = re.fullmatch if whole else re.search
    return float(find(pattern, sample.response, re.DOTALL) is not None)


def finished(sample: RewardInput) -> float:
    """1 if the response ended by itself, 0 if it was cut off at the budget."""
    return float(sample.status == "completed")


def weighted(sample: RewardInput, *, parts: Mapping[str, Mapping[str, Any]]) -> RewardResult:
    """A weighted sum of other rewards, each kept as a part.

    parts: name -> {function: import path, weight: number (1 when not given), options: mapping}.
    Errors: ConfigError when a function cannot be loaded; errors of `read_score` and of the functions.
    """
    values: dict[str, float | str] = {}
    total, found = 0.0, None
    for name, part in parts.items():
        path = part["function"]
        function = bound(path, part.get("options", {}), f"reward.options.parts.{name}")
        score = read_score(function(sample), path)
        values[name] = score.reward
        total += part.get("weight", 1.0) * score.reward
        found = score.answer if found is None else found
    return RewardResult(total, values, found)
