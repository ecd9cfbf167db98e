"""What users plug in: functions by import path, typed by the protocols here.

Owns the signatures and the loading; a test freezes them. A hook that raises fails its sample with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.errors import ConfigError


@dataclass(frozen=True)
class RewardInput:
    """What a reward sees of a sample."""

    prompt: str | list[dict[str, Any]]
    response: str
    label: Any
    metadata: dict[str, Any]
    response_length: int
    status: str


@dataclass(frozen=True)
class RewardResult:
    """A reward and the named parts it is made of."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Scores one sample. Options come from reward.options."""

    def __call__(self, sample: RewardInput, **options: Any) -> float | RewardResult: ...


@dataclass(frozen=True)
class GroupSample:
    """What a group filter sees of a sample. `reward` is None unless it was scored."""

    sample_id: str
    reward: float | None
    scoring: str


class GroupFilter(Protocol):
    """Decides on a group: None keeps it, text drops it for that reason."""

    def __call__(self, samples: Sequence[GroupSample]) -> str | None: ...


def load_hook(path: str, field_name: str) -> Any:
    """The function at `package.module:function`. Raises ConfigError naming the configuration field."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(
            f"{field_name} = {path}: cannot be imported: {error}; put its package on PYTHONPATH or correct the path"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{field_name} = {path}: {module} has no function {name}; correct the part after the colon"
        )
    return found
