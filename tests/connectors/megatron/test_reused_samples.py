"""Samples that older weights generated: not compared with the engine, but weighed, and their distance reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.core.logprob_gap import LogprobGuard
from tests.support.trainer_ranks import Workers, configuration, log_probabilities, samples, write_batch

LIMIT = 0.02
FURTHER = 0.5  # nats a token that the older weights differ by
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("one step's ratio", 1, {"correction": {"kind": "truncate", "high": 1.2}}),
    ("recomputed", 1, {"old_logprobs": "recompute", "correction": {"kind": "truncate", "high": 1.2}}),
    ("two ranks", 2, {"correction": {"kind": "truncate", "high": 1.2}}),
    ("sampler's ratio", 1, {"old_logprobs": "rollout"}),
    ("critic", 1, {"preset": "ppo", "correction": {"kind": "truncate", "high": 1.2}}),
]


@pytest.mark.parametrize(("name", "world", "algorithm"), CASES, ids=[case[0] for case in CASES])
def test_a_reused_sample_is_not_compared_but_weighed_and_its_distance_reported(
    workers: Workers,
    model: Callable[..., Path],
    tmp_path: Path,
    name: str,
    world: int,
    algorithm: dict[str, Any],
) -> None:
    rows = samples(1) + samples(2)
    with workers.group(configuration(model(), world, algorithm=algorithm, global_batch=8)) as group:
        sampled = group.run(log_probabilities, write_batch(tmp_path / "any", rows))[0]
        for at, row in enumerate(rows):
            row["rollout_logprobs"] = sampled[row["sample_id"]]
            if at % 4 == 3:  # a share of each step; in one of two ranks there may be none
                row["rollout_logprobs"] = [value - FURTHER for value in row["rollout_logprobs"]]
                row |= {"reused_from": 0, "uses": 2}
        batch = write_batch(tmp_path / "reused", rows)
        steps = [group.step(1, batch, LogprobGuard(LIMIT))[0], group.step(2, batch)[0]]
    for number, step in enumerate(steps):
        assert step["logprob_gap_max"] < 1e-4
        assert step["behaviour_kl"] == pytest.approx(math.exp(FURTHER) - 1 - FURTHER, rel=1e-3)
        mine = rows[8 * number : 8 * number + 8]
        tokens = [(sum(row["loss_mask"]), "reused_from" in row) for row in mine]
        share = sum(count for count, again in tokens if again) / sum(count for count, _ in tokens)
        weight = 0.0 if algorithm.get("old_logprobs") == "rollout" else math.exp(FURTHER) - 1
        assert step["importance_mean"] == pytest.approx(1 + share * weight, rel=1e-3)


def test_without_reused_samples_no_figure_of_them_is_reported(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    with workers.group(configuration(model())) as group:
        assert "behaviour_kl" not in group.train([1], batch.format(1))[0]
