"""Rewards by comparing text. Pure: strings in, a number out."""

from __future__ import annotations

from typing import Any

from millrace.core.hooks import RewardInput


def exact_match(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> float:
    """1 if the response is the label, else 0."""
    return float(_normal(sample.response, strip, ignore_case) == _normal(sample.label, strip, ignore_case))


def contains(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> float:
    """1 if the label occurs in the response, else 0; an empty label never does."""
    label = _normal(sample.label, strip, ignore_case)
    return float(bool(label) and label in _normal(sample.response, strip, ignore_case))


def _normal(text: Any, strip: bool, ignore_case: bool) -> str:
    plain = "" if text is None else str(text)
    plain = plain.strip() if strip else plain
    return plain.casefold() if ignore_case else plain
