"""The run folder on an object store: the same run, the same promises."""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path

import pyarrow.parquet as pq
import s3fs
from flow_runs import Workplace


def test_a_run_on_s3_survives_a_kill_and_is_not_repeated(workplace: Workplace, s3_bucket: str) -> None:
    root = f"{s3_bucket}/{uuid.uuid4().hex}"
    fs = s3fs.S3FileSystem(
        endpoint_url=os.environ["AWS_ENDPOINT_URL"], use_listings_cache=False, skip_instance_cache=True
    )
    folder = f"{root.removeprefix('s3://')}/a"
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    workplace.environment.update(aws)
    workplace.train_and_kill(root, lambda: bool(fs.glob(f"{folder}/iterations/000001/rollouts/*.parquet")))
    assert "of them now" in workplace.train(root)
    assert "3 iterations complete, 0 of them now" in workplace.train(root)
    samples = []
    for index in range(3):
        data = fs.cat_file(f"{folder}/iterations/{index:06d}/batch.parquet")
        samples += pq.read_table(io.BytesIO(data), columns=["sample_id"])["sample_id"].to_pylist()
        assert fs.exists(f"{folder}/iterations/{index:06d}/manifest.json")
    assert len(samples) == len(set(samples)) == 3 * 32
    assert fs.exists(f"{folder}/checkpoints/000003/complete.json")
    assert fs.exists(f"{folder}/exports/000003/model.safetensors")
    assert not (Path(workplace.folder) / "s3:").exists()
