"""Scoring one stored row with a reward function; runs in a worker process that may be killed.

Owns the step from a row to the function's input, and from what it returns to reward and parts; knows nothing of processes
or budgets.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

from millrace.core.contracts.references import resolved
from millrace.core.hooks import RewardInput, RewardResult, load


def sample_input(row: Mapping[str, Any]) -> RewardInput:
    """What the reward sees of a stored row, whose prompt, label and metadata are JSON text."""
    return RewardInput(
        prompt=json.loads(row["prompt"]),
        response=row["response"],
        label=None if row["label"] is None else json.loads(row["label"]),
        metadata=json.loads(row["metadata"]) if row["metadata"] else {},
        response_length=row["response_length"],
        status=row["status"],
        messages=json.loads(row["dialogue"]) if row.get("dialogue") else (),
    )


def score_sample(path: str, options: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Score one row by the function at `path`: {"reward": float, "parts": {name: float}}.

    Errors: ConfigError when the function cannot be loaded; those of `read_score`; and whatever the function raises.
    """
    given = resolved(options, "reward.options")
    answer = load(path, "reward.function")(sample_input(row), **given)
    if inspect.isawaitable(answer):
        answer = asyncio.run(_awaited(answer))
    result = read_score(answer, path)
    return {"reward": result.reward, "parts": dict(result.parts)}


def read_score(answer: Any, path: str) -> RewardResult:
    """What a reward function returned, as floats: a number, a RewardResult, or a mapping.

    Of a mapping the key `reward` is the reward, and every other key is a part.
    Errors: TypeError for anything else, ValueError for a number that is not finite.
    """
    if isinstance(answer, Mapping):
        if "reward" not in answer:
            raise TypeError(
                f"{path} returned a mapping without the key reward, only {sorted(map(str, answer))}; "
                "name the reward `reward`, the other keys are its parts"
            )
        answer = RewardResult(answer["reward"], {str(k): v for k, v in answer.items() if k != "reward"})
    elif not isinstance(answer, RewardResult):
        answer = RewardResult(answer)
    parts = {name: _finite(value, f"part {name}", path) for name, value in answer.parts.items()}
    return RewardResult(_finite(answer.reward, "reward", path), parts)


async def _awaited(answer: Any) -> Any:
    return await answer


def _finite(value: Any, name: str, path: str) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(
            f"{path} returned {name} of type {type(value).__name__}; "
            "return a number, a RewardResult, or a mapping with the key reward"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{path} returned {name} = {number}; a reward is a finite number")
    return number
