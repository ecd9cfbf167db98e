"""A driver that is stopped, replaced and continued; two runs of one name on one machine; a copy of a run beside it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.flow_runs import PATIENCE_S, Workplace, final_weights, output_of, trained, wait_until


def start(place: Workplace, root: Path, hold: str, **environment: str) -> tuple[subprocess.Popen[str], Path]:
    """Start the run `a`; it waits at a kill point until the file is removed."""
    held = root / f"held-{hold.replace('/', '-')}"
    points = {"MILLRACE_KILL_POINT": hold, "MILLRACE_KILL_POINT_FILE": str(held)}
    process = place.start("train", "run.yaml", f"storage.root={root}", **points, **environment)
    wait_until(lambda: held.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    return process, held


@pytest.mark.slow
def test_a_driver_that_is_stopped_replaced_and_continued_harms_nothing(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    stale, held = start(workplace, tmp_path, "1/rollout/in")
    os.kill(stale.pid, signal.SIGSTOP)
    claim = tmp_path / "a" / "lease" / "000001.json"
    record = json.loads(claim.read_text())
    record["process"]["boot"] = (
        "another"  # as if it were another host's: nobody can know that it is only stopped
    )
    claim.write_text(json.dumps(record))
    successor, held_again = start(workplace, tmp_path, "1/reward/in", MILLRACE_LEASE_S="3")
    held.unlink()
    os.kill(stale.pid, signal.SIGCONT)
    out = output_of(stale)
    assert stale.returncode == 2, out
    assert f"taken over by process {successor.pid} on " in out
    held_again.unlink()
    out = output_of(successor)
    assert successor.returncode == 0, out
    assert "no sign of life of process" in out
    assert "rebuilding" not in out  # the stale driver has ended none of its actors
    assert "starting it again" not in out
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", str(tmp_path))
    assert trained(tmp_path / "a") == trained(whole)
    assert final_weights(tmp_path / "a") == final_weights(whole)


@pytest.mark.slow
def test_two_runs_of_one_name_run_side_by_side(workplace: Workplace, whole: Path, tmp_path: Path) -> None:
    """Under two storage roots, started at once."""
    roots = [tmp_path / "one", tmp_path / "two"]
    processes = [workplace.start("train", "run.yaml", f"storage.root={root}") for root in roots]
    for process in processes:
        out = output_of(process, 2 * PATIENCE_S)
        assert process.returncode == 0, out
    for root in roots:
        assert trained(root / "a") == trained(whole)
        assert final_weights(root / "a") == final_weights(whole)
    identities = {json.loads((root / "a" / "run.json").read_text())["id"] for root in roots}
    assert len(identities) == 2


@pytest.mark.slow
def test_a_copy_of_a_run_goes_on_beside_its_original(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    roots = [tmp_path / "original", tmp_path / "copy"]
    roots[0].mkdir()
    original, held = start(workplace, roots[0], "1/train_step/before")
    shutil.copytree(roots[0] / "a", roots[1] / "a")
    # its lease is of another folder: nobody can know that the holder, which lives, drives another run
    out = workplace.train(roots[1], MILLRACE_LEASE_S="3")
    assert "no sign of life of process" in out
    held.unlink()
    out = output_of(original)
    assert original.returncode == 0, out
    assert "rebuilding" not in out
    client = MlflowClient(f"sqlite:///{workplace.folder / 'home' / 'mlflow.db'}")
    for root, logged in zip(roots, ([1, 2, 3], [2, 3]), strict=True):
        assert trained(root / "a") == trained(whole)
        assert final_weights(root / "a") == final_weights(whole)
        assert "nothing is wrong" in workplace.call("verify", "a", "--root", str(root))
        tracked = json.loads((root / "a" / "run.json").read_text())["mlflow_run_id"]
        assert [point.step for point in client.get_metric_history(tracked, "reward/mean")] == logged


@pytest.mark.slow
def test_a_copy_under_another_name_is_refused_and_its_remedy_works(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "a")
    shutil.copytree(whole, tmp_path / "b")
    out = workplace.train(tmp_path, "run.name=b", "run.iterations=4", expect=2, COLUMNS="400")
    assert "run.name = 'b': run b has 'a', and it may not change" in out
    assert f"`millrace branch a NEW --at 3 --root {tmp_path}`" in out
    workplace.call("branch", "a", "c", "--at", "3", "--root", str(tmp_path))
    workplace.train(tmp_path, "run.name=c", "run.iterations=4")
