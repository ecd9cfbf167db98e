"""Rewards that compare text."""

from __future__ import annotations

from typing import Any

from core.hooks import RewardInput


def exact_match(sample: RewardInput, *, strip: bool = True) -> float:
    """1 if the response is the label, else 0. Surrounding space does not count with `strip`."""
    wanted, got = str(sample.label), sample.response
    return float(got.strip() == wanted.strip() if strip else got == wanted)


def contains(sample: RewardInput, *, case_sensitive: bool = False) -> float:
    """1 if the label stands in the response, else 0."""
    wanted, got = str(sample.label), sample.response
    return float(wanted in got if case_sensitive else wanted.lower() in got.lower())


def length_penalty(sample: RewardInput, *, limit: int, **_: Any) -> float:
    """0 up to `limit` response tokens, then falling linearly to -1 at twice that."""
    return -min(1.0, max(0.0, sample.response_length / limit - 1))
