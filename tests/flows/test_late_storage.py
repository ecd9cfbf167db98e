"""Runs on a store whose listings lag, and which fails: they train what a run on a local disk trains, or name what is wrong."""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import s3fs

from tests.support.flow_runs import Workplace, output_of, trained
from tests.support.late_s3 import Odds, late_s3

FAULTS = {"errors": 0.05, "lost": 0.02, "slow": 0.03, "seed": 7}
STORES: dict[str, dict[str, Any]] = {
    "hidden": {"hidden": 1.0},
    "stale": {"stale": 1.0},
    "failing": FAULTS | {"stale": 0.3, "hidden": 0.3},
    "failing and stale": FAULTS | {"stale": 1.0},
    "failing and hidden": FAULTS | {"hidden": 0.3, "only": "iterations"},
}
STARTS = 6  # at most, where each names an error


def train_to_its_end(workplace: Workplace, root: str) -> None:
    """Start the run until it is complete. A start that ends before names an error, and is no traceback."""
    for _ in range(STARTS):
        process = workplace.start("train", "run.yaml", f"storage.root={root}")
        said = output_of(process)
        assert "Traceback" not in said
        assert process.returncode in (0, 2), said
        if process.returncode == 0:
            return
        print(said.strip().splitlines()[-1])
    pytest.fail(f"not complete after {STARTS} starts")


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("killed", [False, True], ids=["to its end", "killed"])
def test_a_run_on_late_storage_trains_what_one_on_a_disk_does(
    workplace: Workplace, whole: Path, s3_bucket: str, kind: str, killed: bool
) -> None:
    odds = Odds(**STORES[kind])
    upstream, name = os.environ["AWS_ENDPOINT_URL"], uuid.uuid4().hex
    root = f"{s3_bucket}/{name}"
    fs = s3fs.S3FileSystem(endpoint_url=upstream, use_listings_cache=False, skip_instance_cache=True)
    aws = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    with late_s3(upstream, odds) as endpoint:
        workplace.environment.update({**aws, "AWS_ENDPOINT_URL": endpoint})
        if killed:
            parts = f"bucket/{name}/a/iterations/000001/rollouts/*.parquet"
            workplace.train_and_kill(root, lambda: bool(fs.glob(parts)))
        train_to_its_end(workplace, root)
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", root, AWS_ENDPOINT_URL=upstream)
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
