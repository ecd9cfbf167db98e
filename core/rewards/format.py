"""Rewards for the form of a response, rewards composed of others, and weighted sums whose terms are stored as parts."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.hooks.loading import module_and_name
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.hooks.reward_forms import awaited_answer_of, bound
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


TAKES = {"function", "weight", "options", "name"}


async def mixture(sample: RewardInput, *, parts: Sequence[Mapping[str, Any] | str]) -> RewardResult:
    """The weighted sum of the parts; a weight is 1 when not given.

    parts: each {function, weight, options, name}, or a bare import path. A part's name is its function's unless given. Its
    reward is stored under its name, before the weight, and its own parts under `name.part`. The answer comes from the first
    part that looks for one. Errors: ConfigError for a part of another form, or that cannot be loaded; errors of `read_score`
    and of the parts.
    """
    values: dict[str, float | str] = {}
    total, found = 0.0, None
    for number, part in enumerate(parts):
        path, weight, options, name = _read(part, number)
        if name in values:
            raise _wrong(number, f"a part before it has the name {name}", "give each part its own name")
        function = bound(path, options, f"reward.options.parts.{number}")
        score = read_score(await awaited_answer_of(function, sample), path)
        values[name] = score.reward
        values |= {f"{name}.{inner}": value for inner, value in score.parts.items()}
        total += weight * score.reward
        found = score.answer if found is None else found
    return RewardResult(total, values, found)


def _read(part: Any, number: int) -> tuple[str, float, Mapping[str, Any], str]:
    """Path, weight, options and name of a part."""
    part = {"function": part} if isinstance(part, str) else part
    if not isinstance(part, Mapping) or not isinstance(part.get("function"), str):
        raise _wrong(number, "names no function", "write {function: package.module:function, weight: 1}")
    unknown = sorted(map(str, set(part) - TAKES))
    if unknown:
        raise _wrong(number, f"has unknown keys: {', '.join(unknown)}", f"use {', '.join(sorted(TAKES))}")
    path, weight = part["function"], part.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise _wrong(number, f"has the weight {weight!r}", "give a number")
    name = part.get("name") or module_and_name(path)[1]
    return path, float(weight), part.get("options") or {}, str(name)


def _wrong(number: int, reason: str, remedy: str) -> ConfigError:
    return ConfigError(reason, where=f"reward.options.parts.{number}", remedy=remedy)
