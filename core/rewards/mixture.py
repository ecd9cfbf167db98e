"""A reward that is a weighted sum of other rewards of any form, each stored as a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.hooks.loading import module_and_name
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.hooks.reward_forms import awaited_answer_of, bound
from millrace.core.rewards.scoring import read_score

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
