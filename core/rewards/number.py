"""Rewards that compare numbers."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from core.hooks import RewardInput

NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


def last_number(sample: RewardInput, *, tolerance: float = 0.0) -> float:
    """1 if the last number in the response equals the label within `tolerance`, else 0."""
    found = NUMBER.findall(sample.response)
    if not found:
        return 0.0
    try:
        got, wanted = _decimal(found[-1]), _decimal(str(sample.label))
    except InvalidOperation:
        return 0.0
    return float(abs(got - wanted) <= Decimal(str(tolerance)))


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").rstrip("."))
