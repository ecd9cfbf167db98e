"""What is said of a group."""

from __future__ import annotations

import pytest

from millrace.core import group_filters as filters
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.filter import Filter
from millrace.core.group_filters import GroupSample, Judgement, judge_group


def group(*rewards: float | None) -> list[GroupSample]:
    return [
        GroupSample(f"s{i}", reward, "failed" if reward is None else "scored")
        for i, reward in enumerate(rewards)
    ]


GRPO, PPO = Algorithm(), Algorithm(preset="ppo")
ALL, VARIED = Filter(), Filter(drop_zero_variance=True)


@pytest.mark.parametrize(
    ("samples", "filter", "algorithm", "expected"),
    [
        (group(1, 0), ALL, GRPO, Judgement(True, "", True)),
        (group(1, 1), ALL, GRPO, Judgement(True, "", True, True)),
        (group(1, 1), VARIED, GRPO, Judgement(False, "zero variance: all rewards 1", True, True)),
        (group(1, 0, None), VARIED, GRPO, Judgement(True, "", True)),
        (
            group(1, None),
            ALL,
            GRPO,
            Judgement(False, "too few scored samples: 1 of 2, 2 are needed", False, True),
        ),
        (group(1, None), ALL, PPO, Judgement(True, "", True, True)),
        (
            group(None, None),
            ALL,
            PPO,
            Judgement(False, "too few scored samples: 0 of 2, 1 are needed", False),
        ),
    ],
)
def test_judgements(samples, filter, algorithm, expected) -> None:  # type: ignore[no-untyped-def]
    assert judge_group(samples, filter, algorithm) == expected


def test_a_users_filter_drops_for_good() -> None:
    strict = Filter(group_filter="millrace.core.group_filters:fully_scored")
    assert judge_group(group(1, 0, None), strict, GRPO) == Judgement(
        False, "1 of 3 samples were not scored", False
    )
    assert judge_group(group(1, 0), strict, GRPO).keep


def test_filters_to_name() -> None:
    assert filters.not_all_correct(group(1, 1, None)) == "all samples are correct"
    assert filters.not_all_correct(group(1, 0)) is None
    assert filters.not_all_wrong(group(0, 0)) == "all samples are wrong"
    assert filters.not_all_wrong(group(0, 0.5)) is None
