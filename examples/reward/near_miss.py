"""A reward with named parts: how close a number is to the answer, and a price for length."""

from __future__ import annotations

from millrace import RewardInput


def near_miss(sample: RewardInput, *, scale: float = 10.0, price: float = 0.01) -> dict[str, float]:
    """1 for the right number, less the further away, 0 without a number; `price` is paid for every token."""
    try:
        closeness = max(0.0, 1 - abs(float(sample.response) - float(sample.label)) / scale)
    except ValueError:
        closeness = 0.0
    paid = price * sample.response_length
    return {"reward": closeness - paid, "closeness": closeness, "length": -paid}
