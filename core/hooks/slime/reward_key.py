"""A mapping whose reward is under a key that the user names. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any


def under_reward(answer: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping as `read_score` takes it: the value at `key` as `reward`, and its other numbers and texts.

    Errors: KeyError without the key.
    """
    parts = {
        name: value if isinstance(value, str) else float(value)
        for name, value in answer.items()
        if name not in (key, "reward") and isinstance(value, Real | str)
    }
    return {**parts, "reward": answer[key]}
