"""Figures of an iteration."""

from __future__ import annotations

from itertools import combinations

import pyarrow as pa
import pytest

from millrace.core.contracts.task_records import SamplePromptsRecord
from millrace.core.metrics import (
    curriculum_metrics,
    group_metrics,
    pass_at_k,
    sample_metrics,
    session_metrics,
    settled,
    staleness_metrics,
)


def tables() -> tuple[pa.Table, pa.Table]:
    rollouts = pa.table(
        {
            "sample_id": ["a", "b", "c", "d"],
            "source": ["x", "x", "y", "y"],
            "response_length": [1, 2, 3, 10],
            "status": ["completed", "truncated", "completed", "failed"],
            "policy_versions": [
                [{"first_token": 0, "version": 3}],
                [{"first_token": 0, "version": 1}, {"first_token": 2, "version": 3}],
                [],
                [],
            ],
        }
    )
    rewards = pa.table(
        {
            "sample_id": ["d", "c", "b", "a"],
            "group_id": ["h", "h", "g", "g"],
            "scoring": ["skipped", "scored", "scored", "scored"],
            "reward": pa.array([None, 1.0, 0.0, 1.0]),
            "reward_parts": pa.array([[], [], [], []], type=pa.map_(pa.string(), pa.float64())),
        }
    )
    return rollouts, rewards


def test_sample_metrics_count_only_scored_rewards() -> None:
    metrics = sample_metrics(*tables())
    assert metrics["reward/mean"] == pytest.approx(2 / 3)
    assert metrics["rollout/truncated_share"] == 0.25
    assert metrics["rollout/response_length_median"] == 2.5
    assert metrics["rollout/response_length_max"] == 10
    assert metrics["reward/x/mean"] == 0.5
    assert metrics["reward/y/mean"] == 1.0


@pytest.mark.parametrize("verdict", ["deferred", "returned"])
def test_groups_that_were_cut_count_where_they_end(verdict: str) -> None:
    """With part of a group there was no pass@ of the group's size, and its samples counted in two iterations."""
    verdicts = pa.table({"sample_id": ["a", "b", "c", "d"], "verdict": ["kept", "dropped", verdict, verdict]})
    rollouts, rewards = (settled(table, verdicts) for table in tables())
    found = sample_metrics(rollouts, rewards) | group_metrics(rewards)
    assert (found["rollout/samples"], found["rollout/tokens"]) == (2, 3)
    assert (found["reward/mean"], found["reward/pass@2"]) == (0.5, 1.0)
    assert settled(tables()[0], verdicts.slice(0, 2)) == tables()[0]


def test_group_metrics() -> None:
    metrics = group_metrics(tables()[1])
    assert metrics["reward/zero_variance_share"] == 0.5
    assert metrics["reward/group_std_mean"] == pytest.approx(0.5**0.5)
    assert metrics["reward/pass@1"] == pytest.approx((0.5 + 1) / 2)
    assert "reward/pass@2" not in metrics  # one group has a single scored sample


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(correct: int, k: int) -> None:
    subsets = list(combinations([1] * correct + [0] * (5 - correct), k))
    assert pass_at_k(5, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_staleness_looks_at_the_oldest_token() -> None:
    assert staleness_metrics(tables()[0], 4) == {"staleness/mean": 2.0, "staleness/max": 3.0}
    assert staleness_metrics(tables()[0].slice(2), 4) == {}


def test_a_curriculum_shows_each_level_and_the_stage() -> None:
    plain: SamplePromptsRecord = {"files": [], "groups": 8, "by_source": {"sums": 8}}
    assert curriculum_metrics(plain) == {}
    drawn: SamplePromptsRecord = {**plain, "levels": {"sums": 3, "words": 0}, "stage": 0}
    assert curriculum_metrics(drawn) == {
        "curriculum/sums/level": 3.0,
        "curriculum/words/level": 0.0,
        "curriculum/stage": 0.0,
    }


def test_nothing_generated_gives_no_nan() -> None:
    rollouts, rewards = (table.slice(0, 0) for table in tables())
    assert all(value == value for value in sample_metrics(rollouts, rewards).values())
    assert group_metrics(rewards) == {}


def test_the_samples_of_a_rollout_count_once() -> None:
    rewards = pa.table(
        {
            "sample_id": ["g-0000", "g-0000.01", "g-0001"],
            "group_id": ["g"] * 3,
            "reward": [1.0, 0.0, 1.0],
        }
    )
    assert group_metrics(rewards)["reward/pass@1"] == 0.5
    rollouts = pa.table({"samples": [2, 2, 1], "turns": [3, 1, 2]})
    turns = pa.table({"kind": ["segment", "call", "call"], "failed": [False, True, False]})
    assert session_metrics(rollouts, turns) == {
        "session/turns_mean": 3.0,
        "session/branches_mean": 1.5,
        "session/calls_mean": 1.0,
        "session/failed_calls_share": 0.5,
    }
    plain = pa.table({"samples": pa.array([None], pa.int32()), "turns": [1]})
    assert session_metrics(plain, turns) == {}


def test_parts_of_rewards_have_means_and_with_several_sources_those_of_each() -> None:
    def tables(sources: list[str]) -> tuple[pa.Table, pa.Table]:
        ids = [f"s{number}" for number in range(len(sources))]
        rollouts = {"sample_id": ids, "source": sources, "response_length": [1] * len(ids)}
        rollouts["status"] = ["completed"] * len(ids)
        parts = [[("right", 1.0), ("on time?", 0.0)], [("right", 0.0)], []]
        kind = pa.map_(pa.string(), pa.float64())
        rewards = {"sample_id": ids, "reward": [1.0, 0.0, None], "scoring": ["scored", "scored", "failed"]}
        return pa.table(rollouts), pa.table({**rewards, "reward_parts": pa.array(parts, type=kind)})

    def of_parts(*sources: str) -> dict[str, float]:
        metrics = sample_metrics(*tables(list(sources)))
        return {name: value for name, value in metrics.items() if name.startswith("reward_part/")}

    assert of_parts("a", "a", "a") == {"reward_part/right": 0.5, "reward_part/on time?": 0.0}
    assert of_parts("a", "b", "b") == {
        "reward_part/right": 0.5,
        "reward_part/on time?": 0.0,
        "reward_part/a/right": 1.0,
        "reward_part/a/on time?": 0.0,
        "reward_part/b/right": 0.0,
    }
