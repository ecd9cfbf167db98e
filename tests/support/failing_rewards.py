"""Rewards that fail for some responses, until they are told not to."""

from __future__ import annotations

import time

from millrace.core.hooks.protocols import RewardInput


def fussy(sample: RewardInput, *, corrected: bool = False) -> float:
    """Raises for `bad`, hangs for `slow`; 0.5 for both once it is corrected, and for others the length."""
    if corrected:
        return 0.5 if sample.response in ("bad", "slow") else -1.0
    if sample.response == "slow":
        time.sleep(60)
    if sample.response == "bad":
        return float(sample.metadata["points"])
    return float(len(sample.response))
