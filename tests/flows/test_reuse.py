"""Off-policy reuse: what is trained again is what was trained before, and a killed run reuses the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace.connectors.storage.run_folder import RunFolder
from tests.support.flow_runs import Workplace, final_weights, trained

REUSE = (
    "rollout.buffer={share: 0.25, max_age: 4, max_uses: 2, choose: prioritised}",
    "algorithm.correction.kind=truncate",
    "evaluation.sets=[]",
    "trainer.optimizer.lr=0.01",
)
PLACES = ["2/sample_prompts/in", "2/filter/in", "2/train_step/in", "2/publish/in"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three iterations with a buffer, never interrupted."""
    root = tmp_path_factory.mktemp("reuse")
    workplace.train(root, *REUSE)
    return root / "a"


def batch(run: Path, index: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run / f"iterations/{index:06d}/batch.parquet").to_pylist()
    return rows


def test_reused_samples_are_those_of_an_earlier_batch_and_each_use_is_accounted_for(
    workplace: Workplace, undisturbed: Path
) -> None:
    histories = list(RunFolder(str(undisturbed.parent), "a").history())
    assert [len(history.reused_places()) for history in histories] == [0, 2, 2]
    assert len({place for history in histories for place in history.reused_places()}) == 4, "max_uses is 2"
    for index in (1, 2):
        rows = batch(undisturbed, index)
        assert len(rows) == 32
        assert {row["iteration"] for row in rows} == {index}
        again = [row for row in rows if row["reused_from"] is not None]
        assert len(again) == 8
        assert {row["uses"] for row in again} == {2}
        assert {row["train_step"] for row in again} == {2 * index + 1, 2 * index + 2}, "a share of each step"
        for row in again:
            (origin,) = (
                one for one in batch(undisturbed, row["reused_from"]) if one["sample_id"] == row["sample_id"]
            )
            same = ("tokens", "rollout_logprobs", "loss_mask", "policy_versions", "reward", "prompt")
            assert all(origin[name] == row[name] for name in same)
        metrics = json.loads((undisturbed / f"iterations/{index:06d}/manifest.json").read_text())["tasks"][
            "metrics"
        ]
        assert metrics["reuse/share"] == 0.25
        assert metrics["train/behaviour_kl"] > 0
        assert metrics["train/logprob_gap_max"] < 1e-3, "reused samples are not compared"
        assert metrics["filter/groups_kept"] == 6
    said = workplace.call("verify", "a", "--root", str(undisturbed.parent))
    assert "96 trained samples" in said, said


def test_a_view_of_batches_counts_each_use(workplace: Workplace, undisturbed: Path) -> None:
    query = "select iteration, reused_from, count(*) from batches where reused_from is not null group by all order by all"
    said = workplace.call("sql", "a", query, "--root", str(undisturbed.parent))
    assert "8" in said, said


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_run_reuses_the_same_groups_and_ends_in_the_same_weights(
    workplace: Workplace, undisturbed: Path, tmp_path: Path, place: str
) -> None:
    file = tmp_path / "reached"
    workplace.environment |= {"MILLRACE_KILL_POINT": place, "MILLRACE_KILL_POINT_FILE": str(file)}
    try:
        workplace.train_and_kill(tmp_path / "runs", file.exists, *REUSE)
    finally:
        del workplace.environment["MILLRACE_KILL_POINT"], workplace.environment["MILLRACE_KILL_POINT_FILE"]
    workplace.train(tmp_path / "runs", *REUSE)
    run = tmp_path / "runs" / "a"
    assert trained(run) == trained(undisturbed)
    assert final_weights(run) == final_weights(undisturbed)
    by_clock = ("timings", "engine_id")
    for index in range(3):
        kept, lost = (
            [{k: v for k, v in row.items() if k not in by_clock} for row in batch(each, index)]
            for each in (run, undisturbed)
        )
        assert kept == lost
