"""Groups that generate before any is dropped: what is trained stays the same, and what was not needed is returned."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.flow_runs import Workplace, final_weights, trained
from tests.support.shard_runs import IN_SHARDS

FILTERS = {  # and what becomes of the groups that are drawn
    "filter.drop_zero_variance=true": {"kept", "dropped"},
    "filter.reward_band=[0.0, 1.0]": {"kept", "returned"},
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("where", [(), IN_SHARDS], ids=["driver", "shards"])
@pytest.mark.parametrize("kind", FILTERS)
def test_a_run_that_oversamples_trains_what_one_does_that_waits_for_drops(
    workplace: Workplace, tmp_path: Path, kind: str, where: tuple[str, ...]
) -> None:
    settings = (kind, "filter.refill_factor=1.0", "evaluation.sets=[]")
    waits, begins = tmp_path / "waits", tmp_path / "begins"
    workplace.train(waits, *settings)
    reached = tmp_path / "reached"
    workplace.environment |= {"MILLRACE_KILL_POINT_FILE": str(reached), "MILLRACE_KILL_POINT": "1/rollout/in"}
    try:
        workplace.train_and_kill(begins, reached.exists, *settings, "filter.oversample=1.0", *where)
    finally:
        del workplace.environment["MILLRACE_KILL_POINT"]
    workplace.train(begins, *settings, "filter.oversample=1.0", *where)
    run = begins / "a"
    assert trained(run) == trained(waits / "a")
    assert final_weights(run) == final_weights(waits / "a")
    workplace.call("verify", "a", "--root", str(begins))
    workplace.call("ledger", "a", "--root", str(begins))
    made = {
        row["sample_id"]
        for path in run.glob("iterations/*/rollouts/part-*.parquet")
        for row in pq.read_table(path, columns=["sample_id"]).to_pylist()
    }
    verdicts = [
        row for path in run.glob("iterations/*/verdicts.parquet") for row in pq.read_table(path).to_pylist()
    ]
    returned = {row["sample_id"] for row in verdicts if row["verdict"] == "returned"}
    assert bool(made & returned) == ("returned" in FILTERS[kind])
    assert {row["verdict"] for row in verdicts} >= FILTERS[kind]
