"""A run whose requests go through sglang-router trains the same samples and weights as a run without it."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.flow_runs import Workplace, final_weights

pytest.importorskip("sglang_router")

SAMPLED = ["sample_id", "tokens", "rollout_logprobs", "policy_versions", "reward", "train_step"]


@pytest.mark.slow
def test_a_run_through_a_router_makes_the_same_samples_and_weights(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    router = ["engines.count=2", "engines.router.policy=round_robin"]
    assert "3 iterations complete" in workplace.train(tmp_path, *router)
    for index in range(3):
        batches = [
            pq.read_table(root / "iterations" / f"{index:06d}" / "batch.parquet", columns=SAMPLED)
            for root in (whole, tmp_path / "a")
        ]
        assert batches[0].equals(batches[1])
    assert final_weights(tmp_path / "a") == final_weights(whole)
