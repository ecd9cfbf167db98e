"""Calling a reward on a stored row: what a scoring worker runs. Knows nothing of processes."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

from core.hooks import RewardInput, RewardResult, load_hook


def score_sample(path: str, options: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """{reward, parts} of a sample row. Raises whatever the reward raises, and ValueError for a reward that is no number."""
    result = _reward(path)(sample_input(row), **options)
    if not isinstance(result, RewardResult):
        result = RewardResult(float(result))
    values = {"reward": result.reward, **result.parts}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise ValueError(
            f"{path} gave {', '.join(f'{name} = {values[name]}' for name in bad)}; a reward is a finite number"
        )
    return {
        "reward": float(result.reward),
        "parts": {name: float(value) for name, value in result.parts.items()},
    }


def sample_input(row: Mapping[str, Any]) -> RewardInput:
    """What the reward sees of a stored row."""
    return RewardInput(
        prompt=json.loads(row["prompt"]),
        response=row["response"],
        label=None if row["label"] is None else json.loads(row["label"]),
        metadata=json.loads(row["metadata"]) if row["metadata"] else {},
        response_length=row["response_length"],
        status=row["status"],
    )


@functools.lru_cache(maxsize=16)
def _reward(path: str) -> Any:
    found = load_hook(path, "reward.function")
    if inspect.iscoroutinefunction(found):
        import asyncio

        return lambda sample, **options: asyncio.run(found(sample, **options))
    return found
