"""Functions that tell a teacher something, or fail to."""

from __future__ import annotations

from typing import Any

from millrace.core.hooks.protocols import RewardInput


def label_of(sample: RewardInput, *, text: str = "The answer is") -> str | None:
    return f"{text} {sample.label}." if sample.label == "2" else None


def number(sample: RewardInput) -> Any:
    return 3


def fails(sample: RewardInput) -> str:
    raise ValueError(f"no hint for {sample.response}")
