"""A comparison for a tournament: of two answers the one that is closer to the right number is better."""

from __future__ import annotations

from millrace import RewardInput


def closer(first: RewardInput, second: RewardInput) -> float:
    """1 where the first is closer, 0 where the second is, 0.5 where neither."""
    a, b = distance(first), distance(second)
    return 0.5 if a == b else float(a < b)


def distance(sample: RewardInput) -> float:
    """How far the answer is from the label; without a number further than any."""
    try:
        return abs(int(sample.response) - int(sample.label))
    except ValueError:
        return float("inf")
