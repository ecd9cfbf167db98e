"""What is said of a group."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.core.config.algorithm import Algorithm
from millrace.core.config.filter import Filter
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.errors import ConfigError
from millrace.core.hooks import group_filters as filters
from millrace.core.hooks.group_filters import GroupSample, Judgement, judge_group
from millrace.core.hooks.protocols import RewardInput
from millrace.core.hooks.slime.sample import Sample


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
        (
            group(1, 1),
            VARIED,
            GRPO,
            Judgement(False, "zero variance: all rewards 1", True, True, kind="zero_variance"),
        ),
        (group(1, 0, None), VARIED, GRPO, Judgement(True, "", True)),
        (
            group(1, None),
            ALL,
            GRPO,
            Judgement(
                False, "too few scored samples: 1 of 2, 2 are needed", False, True, kind="too_few_scored"
            ),
        ),
        (group(1, None), ALL, PPO, Judgement(True, "", True, True)),
        (
            group(None, None),
            ALL,
            PPO,
            Judgement(False, "too few scored samples: 0 of 2, 1 are needed", False, kind="too_few_scored"),
        ),
    ],
)
def test_judgements(samples, filter, algorithm, expected) -> None:  # type: ignore[no-untyped-def]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    judged = judge_group(samples, filter, algorithm)
    assert judged.reward == (pytest.approx(sum(rewards) / len(rewards)) if rewards else None)
    assert replace(judged, reward=None) == expected


def test_a_users_filter_drops_for_good() -> None:
    strict = Filter(group_filter="millrace.core.hooks.group_filters:fully_scored")
    assert judge_group(group(1, 0, None), strict, GRPO) == Judgement(
        False, "1 of 3 samples were not scored", False, reward=0.5, kind="group_filter"
    )
    assert judge_group(group(1, 0), strict, GRPO).keep


def test_filters_to_name() -> None:
    assert filters.not_all_correct(group(1, 1, None)) == "all samples are correct"
    assert filters.not_all_correct(group(1, 0)) is None
    assert filters.not_all_wrong(group(0, 0)) == "all samples are wrong"
    assert filters.not_all_wrong(group(0, 0.5)) is None


def made(*samples: tuple[float, int, bool]) -> list[GroupSample]:
    """Rewards, tokens, and whether each was cut."""
    return [
        GroupSample(
            f"s{i}", reward, response_length=tokens, truncated=cut, input=RewardInput("1+1=", f"{i}", label=2)
        )
        for i, (reward, tokens, cut) in enumerate(samples)
    ]


@pytest.mark.parametrize(
    ("filter", "samples", "reason"),
    [
        (Filter(reward_band=(0.2, 0.8)), group(1, 1, 1, 0), ""),
        (Filter(reward_band=(0.25, 0.75)), group(1, 0, 0, 0), ""),  # its ends are in it
        (Filter(reward_band=(0.3, 0.3)), group(0.1, 0.2, 0.3, 0.6), ""),  # a sum of floats is not exact
        (Filter(reward_band=(0.2, 0.8)), group(1, 1, None), "mean reward 1 is outside 0.2 to 0.8"),
        (Filter(reward_band=(0.3, 0.8)), group(1, 0, 0, 0), "mean reward 0.25 is outside 0.3 to 0.8"),
        (Filter(max_truncated_share=0.5), made((1, 9, True), (0, 9, False)), ""),
        (
            Filter(max_truncated_share=0.5),
            made((1, 9, True), (0, 9, True), (0, 9, False)),
            "2 of 3 responses truncated, filter.max_truncated_share = 0.5",
        ),
        (Filter(max_truncated_share=0), made((1, 9, False), (0, 9, False)), ""),
        (Filter(max_mean_response_tokens=10), made((1, 5, False), (0, 15, False)), ""),
        (
            Filter(max_mean_response_tokens=10),
            made((1, 6, False), (0, 15, False)),
            "10.5 tokens a response on average, filter.max_mean_response_tokens = 10",
        ),
        (
            Filter(max_mean_response_tokens=10),
            [
                *made((1, 15, False), (0, 15, False)),
                GroupSample("s9", None, "skipped"),
            ],  # it was not generated
            "15 tokens a response on average, filter.max_mean_response_tokens = 10",
        ),
    ],
)
def test_settings_drop_groups_that_may_stand_in(
    filter: Filter, samples: list[GroupSample], reason: str
) -> None:
    judged = judge_group(samples, filter, GRPO)
    assert (judged.keep, judged.reason, judged.usable) == (not reason, reason, True)
    assert (judged.kind is None) == judged.keep


def broken(samples: Sequence[GroupSample], *, key: str = "") -> str | None:
    raise KeyError(f"points {key}")


def answers(samples: Sequence[GroupSample], *, answer: object) -> object:
    return answer


def of_slime(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    assert [sample.index for sample in samples] == list(range(len(samples)))
    assert samples[0].label == 2
    assert samples[0].prompt == "1+1="
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = max(rewards) - min(rewards) > args.least
    return DynamicFilterOutput(keep=np.bool_(keep), reason=None if keep else f"zero_std_{rewards[0]}")


def of_slime_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    output = of_slime(args, samples)
    output.keep_when_insufficient = True
    return output


def of_slime_by_part(args: Any, samples: list[Sample]) -> Any:
    return sum(sample.reward["exact"] + sample.reward["score"] for sample in samples) > 1


@pytest.fixture
def my_filters(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "my_filters", sys.modules[__name__])
    return "my_filters"


def test_a_filter_that_raises_drops_its_group_and_says_why_without_secrets(
    my_filters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_A_FILTER", "s3cr3t-of-a-filter")
    filter = Filter(
        group_filter=UserFunction(function="my_filters:broken", options={"key": "${env:OF_A_FILTER}"})
    )
    judged = judge_group(group(1, 0), filter, GRPO)
    line = broken.__code__.co_firstlineno + 1
    assert judged == Judgement(
        False,
        f"filter.group_filter failed: KeyError: 'points ${{env:OF_A_FILTER}}' in test_group_filters.py, line {line}",
        False,
        reward=0.5,
        kind="filter_failed",
    )
    assert judge_group(group(1, 0), filter, GRPO) == judged  # again the same


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (None, None, ""),
        ("", None, ""),
        ("too easy", "group_filter", "too easy"),
        (True, "filter_failed", "returned a bool; return None to keep a group, text to drop it"),
        (0.5, "filter_failed", "returned a float"),
    ],
)
def test_what_is_no_answer_drops_the_group(my_filters: str, answer: object, kind: str, says: str) -> None:
    filter = Filter(group_filter=UserFunction(function="my_filters:answers", options={"answer": answer}))
    judged = judge_group(group(1, 0), filter, GRPO)
    assert judged.kind == kind
    assert says in judged.reason


def test_a_filter_that_cannot_be_found_stops_the_run() -> None:
    for function in ("no_such_module:f", "slime:no_such_module.f"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            judge_group(group(1, 0), Filter(group_filter=UserFunction(function=function)), GRPO)


@pytest.mark.parametrize(
    ("function", "samples", "expected"),
    [
        ("of_slime", made((1, 9, False), (0, 9, False)), Judgement(True, "", True)),
        (
            "of_slime",
            made((1, 9, False), (1, 9, False)),
            Judgement(False, "zero_std_1", False, True, kind="group_filter"),
        ),
        (
            "of_slime_with_fallback",
            made((1, 9, False), (1, 9, False)),
            Judgement(False, "zero_std_1", True, True, kind="group_filter"),
        ),
        (  # those without a score are not shown
            "of_slime",
            [*made((1, 9, False), (0, 9, False)), GroupSample("s9", None, "failed")],
            Judgement(True, "", True),
        ),
    ],
)
def test_filters_written_for_slime(
    my_filters: str, function: str, samples: list[GroupSample], expected: Judgement
) -> None:
    options = {"least": 0.5}
    filter = Filter(group_filter=UserFunction(function=f"slime:my_filters.{function}", options=options))
    assert replace(judge_group(samples, filter, GRPO), reward=None) == expected


def test_a_filter_of_slimes_reads_parts_under_reward_key_and_lacks_options_by_name(my_filters: str) -> None:
    def judged(function: str, options: dict[str, Any]) -> Judgement:
        given = UserFunction(function=f"slime:my_filters.{function}", options=options)
        return judge_group(samples, Filter(group_filter=given), GRPO)

    samples = [replace(sample, parts={"exact": 0.5}) for sample in made((1, 9, False), (0, 9, False))]
    assert judged("of_slime_by_part", {"reward_key": "score"}).keep
    assert "args has no least here: give it in the function's options" in judged("of_slime", {}).reason
    assert "returned a NoneType; return a bool or a DynamicFilterOutput" in judged("nothing", {}).reason


def nothing(args: Any, samples: list[Sample]) -> None:
    return None
