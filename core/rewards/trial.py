"""A reward tried once on a row, before a run depends on it; runs in a worker process that may be killed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any, TypedDict

from millrace.core.contracts.references import resolved
from millrace.core.errors import described
from millrace.core.hooks import load
from millrace.core.rewards import scoring

WANTED = "return a number, a RewardResult, or a mapping with the key reward"


class Trial(TypedDict):
    """What a reward gave: a number and its parts; or why there is none, and what to do."""

    reward: float | None
    parts: dict[str, float]
    problem: str
    remedy: str


def try_reward(path: str, options: Mapping[str, Any], row: Mapping[str, Any]) -> Trial:
    """Score a stored row by the function at `path`. What the function raises is described, not raised.

    Errors: ConfigError when the function cannot be loaded.
    """
    function, given = load(path, "reward.function"), resolved(options, "reward.options")
    sample = scoring.sample_input(row)
    try:
        answer = function(sample, **given)
        if inspect.isawaitable(answer):
            answer = asyncio.run(_awaited(answer))
    except Exception as error:  # noqa: BLE001 - a function of the user's may raise anything
        return _failed(f"it raised {described(error)}", "correct the function")
    try:
        score = scoring.read_score(answer, path)
    except (TypeError, ValueError) as error:
        return _failed(str(error).partition(";")[0].removeprefix(f"{path} "), WANTED)
    return Trial(reward=score.reward, parts=dict(score.parts), problem="", remedy="")


async def _awaited(answer: Any) -> Any:
    return await answer


def _failed(problem: str, remedy: str) -> Trial:
    return Trial(reward=None, parts={}, problem=problem, remedy=remedy)
