"""The run folder on an object store, and weights sent through one: the same run, the same promises."""

from __future__ import annotations

import io
import json
import os
import uuid
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import s3fs

from millrace.connectors.storage.store import Store
from tests.support.flow_runs import Workplace


@pytest.mark.slow
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
    assert not [key for key in fs.find(folder) if "//" in key]
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", root)
    assert not (Path(workplace.folder) / "s3:").exists()


@pytest.mark.slow
def test_commands_on_a_run_in_a_bucket(workplace: Workplace, s3_bucket: str, tmp_path: Path) -> None:
    root = f"{s3_bucket}/{uuid.uuid4().hex}"
    place = ("--root", root)
    workplace.environment.update({name: here for name, here in os.environ.items() if name.startswith("AWS_")})
    workplace.train(root)
    workplace.train(tmp_path, "run.iterations=4")
    workplace.call("show", "a", *place)
    workplace.call("verify", "a", *place)
    workplace.call("branch", "a", "new", "--at", "2", *place)
    assert "4 iterations complete, 2 of them now" in workplace.train(root, "run.name=new", "run.iterations=4")
    workplace.call("verify", "new", *place)
    out = workplace.call("replay", "a", "--from", "2", "--to", "3", *place)
    assert "every weight equals the export after iteration 3, bit for bit" in out
    assert "4 iterations complete, 1 of them now" in workplace.train(root, "run.iterations=4")
    assert "nothing is wrong" in workplace.call("verify", "a", *place)
    export = Store(f"{root}/a/exports/000004").read("model.safetensors")
    assert export == (tmp_path / "a" / "exports" / "000004" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_weights_reach_engines_by_way_of_a_bucket_and_nothing_of_them_stays(
    workplace: Workplace, s3_bucket: str, tmp_path: Path
) -> None:
    """Two pipeline stages, two engines; the driver is killed amid the second sync."""
    url = f"{s3_bucket}/{uuid.uuid4().hex}"
    weights = Store(url)
    workplace.environment.update({name: here for name, here in os.environ.items() if name.startswith("AWS_")})
    settings = ["run.name=by-bucket", "run.iterations=2", "sync.kind=disk", f"sync.directory={url}"]
    settings += ["trainer.world_size=2", "trainer.parallel.pipeline=2", "trainer.device=cpu"]
    settings += ["engines.kind=embedded", "engines.count=2"]
    workplace.train_and_kill(
        tmp_path, lambda: any("/weights-00000004/model-" in name for name in weights.list()), *settings
    )
    assert "2 iterations complete" in workplace.train(tmp_path, *settings)
    run = tmp_path / "by-bucket"
    for index in range(2):
        folder = run / "iterations" / f"{index:06d}"
        record = json.loads((folder / "results" / "sync_weights.json").read_text())["result"]
        assert json.loads(record)["version"] == 2 * (index + 1)
        rows = pq.read_table(folder / "batch.parquet").to_pylist()
        assert all(row["policy_versions"] == [{"first_token": 0, "version": 2 * index}] for row in rows)
    first = run / "iterations" / "000000" / "results" / "sync_weights.json"
    assert "fetch" in first.read_text()
    out = workplace.call("replay", "by-bucket", "--from", "0", "--to", "2", "--root", str(tmp_path))
    assert "every weight equals the export after iteration 2, bit for bit" in out
    assert weights.list() == []
    assert not list(Path("/dev/shm").glob("millrace-by-bucket*"))
    assert not (workplace.folder / "s3:").exists()
