"""Runs on a store whose listings lag, and which fails: they train what a run on a local disk trains, or name what is wrong."""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import s3fs

from tests.support.flow_runs import Workplace, trained
from tests.support.late_s3 import Odds, late_s3

NEWEST_HIDDEN = Odds(hidden=1.0)
FAILING = Odds(errors=0.05, lost=0.02, stale=0.3, hidden=0.3, seed=7)
AS_BEFORE = Odds(stale=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("odds", [NEWEST_HIDDEN, AS_BEFORE, FAILING], ids=["hidden", "stale", "failing"])
@pytest.mark.parametrize("killed", [False, True], ids=["to its end", "killed"])
def test_a_run_on_late_storage_trains_what_one_on_a_disk_does(
    workplace: Workplace, whole: Path, s3_bucket: str, odds: Odds, killed: bool
) -> None:
    upstream, name = os.environ["AWS_ENDPOINT_URL"], uuid.uuid4().hex
    root = f"{s3_bucket}/{name}"
    fs = s3fs.S3FileSystem(endpoint_url=upstream, use_listings_cache=False, skip_instance_cache=True)
    aws = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    with late_s3(upstream, odds) as endpoint:
        workplace.environment.update({**aws, "AWS_ENDPOINT_URL": endpoint})
        if killed:
            parts = f"bucket/{name}/a/iterations/000001/rollouts/*.parquet"
            workplace.train_and_kill(root, lambda: bool(fs.glob(parts)))
        workplace.train(root)
        assert "nothing is wrong" in workplace.call("verify", "a", "--root", root)
    assert odds.happened["hidden"] + odds.happened["stale"] > 10
    folder = f"bucket/{name}/a"
    pairs = set()
    for index in range(3):
        batch = fs.cat_file(f"{folder}/iterations/{index:06d}/batch.parquet")
        table = pq.read_table(io.BytesIO(batch), columns=["sample_id", "train_step"])
        pairs |= {(row["sample_id"], row["train_step"]) for row in table.to_pylist()}
    assert pairs == set(trained(whole))
    weights = "exports/000003/model.safetensors"
    assert fs.cat_file(f"{folder}/{weights}") == (whole / weights).read_bytes()
