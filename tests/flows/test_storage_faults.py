"""Storage that fails now and then changes nothing. A full disk stops a run cleanly; it resumes when there is space."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow_runs import Workplace, final_weights, output_of, trained, wait_until


@pytest.mark.slow
def test_a_run_on_storage_that_fails_now_and_then_ends_the_same(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    out = workplace.train(tmp_path, MILLRACE_STORAGE_FAULTS="0.05:1")
    assert out.count("retrying: [Errno 5]") > 10
    assert trained(tmp_path / "a") == trained(whole)
    assert final_weights(tmp_path / "a") == final_weights(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "landed",
    [
        "iterations/000001/rollouts/*.parquet",
        "checkpoints/000002/complete.json",
    ],
)
def test_a_full_disk_stops_the_run_and_nothing_is_lost(
    workplace: Workplace, whole: Path, tmp_path: Path, landed: str
) -> None:
    full, run = tmp_path / "full", tmp_path / "a"
    process = workplace.start(
        "train", "run.yaml", f"storage.root={tmp_path}", MILLRACE_STORAGE_FULL=str(full)
    )
    wait_until(lambda: any(run.glob(landed)) or process.poll() is not None)
    full.touch()
    out = output_of(process)
    assert process.returncode == 2, out
    assert "the disk is full: free space and start again; nothing committed is lost" in out
    kept = {path: path.read_bytes() for path in run.glob("iterations/*/rollouts/*.parquet")}
    full.unlink()
    assert "of them now" in workplace.train(tmp_path)
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    assert all(path.read_bytes() == data for path, data in kept.items())
