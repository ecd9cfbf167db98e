"""Rewards by comparing text. Pure: strings in, a number out."""

from __future__ import annotations

from typing import Any

from millrace.core.errors import DataError
from millrace.core.hooks.protocols import RewardInput, RewardResult


def exact_match(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> RewardResult:
    """1 if the response, which is the answer, is the label, else 0."""
    answer = _normal(sample.response, strip, ignore_case)
    return RewardResult(float(answer == _normal(sample.label, strip, ignore_case)), answer=answer)


def contains(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> float:
    """1 if the label occurs in the response, else 0; an empty label never does."""
    label = _normal(sample.label, strip, ignore_case)
    return float(bool(label) and label in _normal(sample.response, strip, ignore_case))


def label_text(label: Any) -> str:
    """A label as text for comparison with a response; empty without a label.

    Errors: DataError for a list or a mapping, which no response equals.
    """
    if isinstance(label, list | dict):
        raise DataError(
            f"it is a {type(label).__name__}, and the reward compares with text",
            where="label of the row",
            remedy="set label_key of the source to the text within it, as in label_key: label.answer",
        )
    return "" if label is None else str(label)


def _normal(text: Any, strip: bool, ignore_case: bool) -> str:
    plain = label_text(text)
    plain = plain.strip() if strip else plain
    return plain.casefold() if ignore_case else plain
