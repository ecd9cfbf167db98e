"""Which groups are worth a training step. Pure decisions on one group at a time.

Owns the verdict on a group; knows nothing of how many groups an iteration needs or where others come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.config.algorithm import Algorithm
from millrace.core.config.filter import Filter
from millrace.core.hooks import GroupSample as GroupSample
from millrace.core.hooks import call_function

ZERO_VARIANCE = 1e-6  # rewards that differ by less are equal


@dataclass(frozen=True)
class Judgement:
    """The decision on a group. `usable`: it may stand in where too few groups are kept; `reason` is empty when kept."""

    keep: bool
    reason: str
    usable: bool
    zero_variance: bool = False


def judge_group(samples: Sequence[GroupSample], filter: Filter, algorithm: Algorithm) -> Judgement:
    """Judge a group whose samples have all been generated and scored, or failed at it.

    Dropped for good: fewer scored samples than the estimator needs (two where it compares samples, else one), or refused by
    the user's filter. Dropped but usable: rewards all equal, under filter.drop_zero_variance.
    Errors: ConfigError when the user's filter cannot be loaded or raises.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    smallest = 2 if algorithm.group_baseline else 1
    equal = zero_variance(rewards)
    if len(rewards) < smallest:
        return Judgement(
            False,
            f"too few scored samples: {len(rewards)} of {len(samples)}, {smallest} are needed",
            False,
            equal,
        )
    if filter.group_filter is not None:
        refusal = call_function(filter.group_filter, "filter.group_filter", samples)
        if refusal:
            return Judgement(False, str(refusal), False, equal)
    if filter.drop_zero_variance and equal:
        return Judgement(False, f"zero variance: all rewards {rewards[0]:g}", True, True)
    return Judgement(True, "", True, equal)


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group are all equal (False for a group with none)."""
    return bool(rewards) and max(rewards) - min(rewards) <= ZERO_VARIANCE


# filters to name in filter.group_filter


def not_all_correct(samples: Sequence[GroupSample], *, correct: float = 1.0) -> str | None:
    """Drop groups in which every scored sample has at least the reward `correct`: nothing is left to learn."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return "all samples are correct" if rewards and min(rewards) >= correct else None


def not_all_wrong(samples: Sequence[GroupSample], *, wrong: float = 0.0) -> str | None:
    """Drop groups in which no scored sample has more than the reward `wrong`: nothing shows what would be right."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return "all samples are wrong" if rewards and max(rewards) <= wrong else None


def fully_scored(samples: Sequence[GroupSample]) -> str | None:
    """Drop groups with any sample that could not be generated or scored."""
    missing = sum(sample.reward is None for sample in samples)
    return f"{missing} of {len(samples)} samples were not scored" if missing else None
