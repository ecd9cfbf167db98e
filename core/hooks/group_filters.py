"""Which groups are worth a training step. Pure decisions on one group at a time.

Owns the verdict on a group; does not know how many groups an iteration needs, or how dropped ones are replaced.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from millrace.core.config.algorithm import Algorithm
from millrace.core.config.filter import Filter
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.contracts.references import resolved
from millrace.core.hooks.loading import failure_of, load, load_function, written_for_slime
from millrace.core.hooks.protocols import GroupSample as GroupSample
from millrace.core.hooks.slime.filter import slime_verdict

ZERO_VARIANCE = 1e-6  # rewards that differ by less are equal
FIELD = "filter.group_filter"
Kind = Literal[
    "unusable_row",
    "too_few_scored",
    "group_filter",
    "filter_failed",
    "zero_variance",
    "reward_band",
    "truncated",
    "too_long",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Judgement:
    """The decision on a group. `usable`: it may be used if too few groups are kept; `reason` is empty for a kept group.

    `kind` names the filter that dropped it.
    """

    keep: bool
    reason: str
    usable: bool
    zero_variance: bool = False
    kind: Kind | None = None
    # figures of the scored samples' rewards; no decision depends on them
    reward: float | None = field(default=None, compare=False)  # mean
    reward_std: float | None = field(default=None, compare=False)  # standard deviation


def judge_group(samples: Sequence[GroupSample], filter: Filter, algorithm: Algorithm) -> Judgement:
    """Judge a group whose samples have all been generated and scored, or failed at it.

    Dropped for good: fewer scored samples than the estimator needs (two if it compares samples, else one), or refused by
    the user's filter, or that filter raised on it. Dropped but usable: by any other filter of the configuration.
    Errors: ConfigError when the user's filter cannot be loaded.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return replace(
        _judged(samples, rewards, filter, algorithm),
        zero_variance=zero_variance(rewards),
        reward=sum(rewards) / len(rewards) if rewards else None,
        reward_std=_std(rewards) if rewards else None,
    )


def _judged(
    samples: Sequence[GroupSample], rewards: Sequence[float], filter: Filter, algorithm: Algorithm
) -> Judgement:
    smallest = 2 if algorithm.group_baseline else 1
    if len(rewards) < smallest:
        reason = f"too few scored samples: {len(rewards)} of {len(samples)}, {smallest} are needed"
        return _dropped("too_few_scored", reason, usable=False)
    dropped = _by_function(filter.group_filter, samples) if filter.group_filter else None
    return dropped or _by_settings(samples, rewards, filter) or Judgement(True, "", True)


def _std(rewards: Sequence[float]) -> float:
    mean = sum(rewards) / len(rewards)
    return math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group are all equal (False for a group with none)."""
    return bool(rewards) and max(rewards) - min(rewards) <= ZERO_VARIANCE


def _dropped(kind: Kind, reason: str, *, usable: bool) -> Judgement:
    return Judgement(False, reason, usable, kind=kind)


def _by_function(function: UserFunction, samples: Sequence[GroupSample]) -> Judgement | None:
    """The judgement of the user's filter. If it raises or returns no valid answer, the group is dropped for that reason."""
    slime = written_for_slime(function.function)
    loaded = load(function.function, f"{FIELD}.function") if slime else load_function(function, FIELD)
    options = resolved(function.options, f"{FIELD}.options")
    try:
        if slime:
            verdict = slime_verdict(loaded, options, samples)
            usable = verdict.keep_when_insufficient
            return None if verdict.keep else _dropped("group_filter", verdict.reason or "", usable=usable)
        refusal = loaded(samples)
        if refusal is not None and not isinstance(refusal, str):
            raise TypeError(
                f"it returned a {type(refusal).__name__}; return None to keep a group, text to drop it"
            )
    except Exception as error:  # noqa: BLE001 - a function of the user's may raise anything
        return _dropped("filter_failed", f"{FIELD} failed: {failure_of(error, function)}", usable=False)
    return _dropped("group_filter", refusal, usable=False) if refusal else None


def _by_settings(
    samples: Sequence[GroupSample], rewards: Sequence[float], filter: Filter
) -> Judgement | None:
    """The first of the other filters that drops a group with these samples, and rewards of the scored ones.

    The band includes its ends, as the accuracy filter of PRIME does (Cui et al., arXiv:2502.01456). Lengths are of generated
    samples.
    """
    if filter.drop_zero_variance and zero_variance(rewards):
        return _dropped("zero_variance", f"zero variance: all rewards {rewards[0]:g}", usable=True)
    if filter.reward_band is not None:
        low, high = filter.reward_band
        mean = sum(rewards) / len(rewards)
        if not low - ZERO_VARIANCE <= mean <= high + ZERO_VARIANCE:
            reason = f"mean reward {mean:g} is outside {low:g} to {high:g}"
            return _dropped("reward_band", reason, usable=True)
    made = [sample for sample in samples if sample.scoring != "skipped"]
    if filter.max_truncated_share is not None:
        cut = sum(sample.truncated for sample in made)
        if cut > filter.max_truncated_share * len(made):
            reason = f"{cut} of {len(made)} responses truncated, filter.max_truncated_share = {filter.max_truncated_share:g}"
            return _dropped("truncated", reason, usable=True)
    if filter.max_mean_response_tokens is not None:
        length = sum(sample.response_length for sample in made) / len(made)
        if length > filter.max_mean_response_tokens:
            limit = f"filter.max_mean_response_tokens = {filter.max_mean_response_tokens}"
            return _dropped("too_long", f"{length:g} tokens a response on average, {limit}", usable=True)
    return None


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
