"""A mapping whose reward is under a key of the user's own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any


def under_reward(answer: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping as `read_score` takes it: the value at `key` as `reward`, and its other numbers as parts.

    Errors: KeyError without the key.
    """
    parts = {name: float(value) for name, value in answer.items() if name != key and isinstance(value, Real)}
    return {**parts, "reward": answer[key]}
