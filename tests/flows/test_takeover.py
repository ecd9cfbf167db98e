"""A driver that is stopped, replaced and continued; and two runs of one name on one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.flow_runs import PATIENCE_S, Workplace, final_weights, trained, wait_until


def start(place: Workplace, root: Path, hold: str, **environment: str) -> tuple[subprocess.Popen[str], Path]:
    """Start the run `a`; it waits at a kill point until the file is removed."""
    held = root / f"held-{hold.replace('/', '-')}"
    points = {"MILLRACE_KILL_POINT": hold, "MILLRACE_KILL_POINT_FILE": str(held)}
    process = place.start("train", "run.yaml", f"storage.root={root}", **points, **environment)
    wait_until(lambda: held.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    return process, held


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
    out, _ = stale.communicate(timeout=PATIENCE_S)
    assert stale.returncode == 2, out
    assert f"taken over by process {successor.pid} on " in out
    held_again.unlink()
    out, _ = successor.communicate(timeout=PATIENCE_S)
    assert successor.returncode == 0, out
    assert "no sign of life of process" in out
    assert "rebuilding" not in out  # the stale driver has ended none of its actors
    assert "starting it again" not in out
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", str(tmp_path))
    assert trained(tmp_path / "a") == trained(whole)
    assert final_weights(tmp_path / "a") == final_weights(whole)


@pytest.mark.slow
def test_two_runs_of_one_name_run_side_by_side(workplace: Workplace, whole: Path, tmp_path: Path) -> None:
    """Under two storage roots, started at once; a copy of a run goes on beside its original as well."""
    roots = [tmp_path / "one", tmp_path / "two"]
    processes = [workplace.start("train", "run.yaml", f"storage.root={root}") for root in roots]
    for process in processes:
        out, _ = process.communicate(timeout=2 * PATIENCE_S)
        assert process.returncode == 0, out
    for root in roots:
        assert trained(root / "a") == trained(whole)
        assert final_weights(root / "a") == final_weights(whole)
    identities = {json.loads((root / "a" / "run.json").read_text())["id"] for root in roots}
    assert len(identities) == 2
