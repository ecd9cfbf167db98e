"""Rewards for answers that are numbers. Pure: strings in, a number out."""

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.text import minus_signs

# commas group thousands, or stand between two numbers
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3}){1,20}(?!\d|,\d)(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
LONGEST = 64  # digits and signs of one number; longer runs are no answers
LARGEST = 10_000  # exponent of ten; Decimal overflows far beyond it


def find_last(text: str) -> Decimal | None:
    """The last number in a text; None when there is none.

    A minus counts only if no digit or letter stands right before it, so that "7-3" ends in 3. Any minus sign of Unicode
    counts.
    """
    text, last = minus_signs(text), None
    for match in NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    found = last.group()
    if (
        found[0] in "+-"
        and last.start() > 0
        and (text[last.start() - 1].isalnum() or text[last.start() - 1] in ")]")
    ):
        found = found[1:]
    return _decimal(found)


def arithmetic(sample: RewardInput, *, tolerance: float = 0.0) -> RewardResult:
    """1 if the last number in the response equals the label (within `tolerance`, absolute), else 0.

    Errors: ValueError when the label is not a number: the data are wrong, not the response.
    """
    label = _decimal(sample.label)
    if label is None:
        raise ValueError(f"label {sample.label!r} is not a number")
    answer = find_last(sample.response)
    if answer is None:
        return RewardResult(0.0, answer="")
    right = abs(answer - label) <= Decimal(str(tolerance))
    return RewardResult(float(right), answer=_normal_form(answer))


def _normal_form(value: Decimal) -> str:
    # `or` turns -0 into 0
    plain = value.normalize() or Decimal(0)
    return f"{plain:f}" if abs(plain.adjusted()) < LONGEST else str(plain)


def _decimal(text: Any) -> Decimal | None:
    plain = minus_signs(str(text)).strip()
    if len(plain) > LONGEST or NUMBER.fullmatch(plain) is None:
        return None
    try:
        value = Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() and abs(value.adjusted()) <= LARGEST else None
