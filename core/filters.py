"""Which groups are worth a training step. Pure decisions on one group at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.hooks import GroupSample

ZERO_VARIANCE = 1e-6  # rewards that differ by less are equal


@dataclass(frozen=True)
class Judgement:
    """What a filter says of a group. `usable`: it may stand in for a missing group; `reason` is empty when kept."""

    keep: bool
    reason: str
    usable: bool
    zero_variance: bool = False


def judge_group(
    samples: Sequence[GroupSample],
    *,
    drop_zero_variance: bool,
    smallest: int,
    custom: Callable[[Sequence[GroupSample]], str | None] | None = None,
) -> Judgement:
    """Judge a group whose samples have all been generated and scored, or failed at it.

    `smallest`: fewest scored samples that still make a group for the advantage estimator.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    equal = bool(rewards) and max(rewards) - min(rewards) <= ZERO_VARIANCE
    if len(rewards) < smallest:
        return Judgement(False, f"too few scored samples: {len(rewards)} of {len(samples)}", False, equal)
    if drop_zero_variance and equal:
        return Judgement(False, f"zero variance: all rewards {rewards[0]:g}", True, True)
    reason = custom(samples) if custom else None
    if reason:
        return Judgement(False, reason, True, equal)
    return Judgement(True, "", True, equal)
