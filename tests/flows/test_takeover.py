"""A driver that is stopped, replaced and continued, also with several iterations open; two runs of one name; a copy of a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.soak import forms, promises
from tests.support.flow_runs import PATIENCE_S, Workplace, final_weights, output_of, trained, wait_until

OPEN = (1, 2, 3)  # indices of the iterations that are open while the first of them waits to be trained


def start(
    place: Workplace, root: Path, hold: str, *overrides: str, held: Path | None = None, **environment: str
) -> tuple[subprocess.Popen[str], Path]:
    """Start the run `a`; it waits at a kill point until the file `held` is removed."""
    held = held or root / f"held-{hold.replace('/', '-')}"
    points = {"MILLRACE_KILL_POINT": hold, "MILLRACE_KILL_POINT_FILE": str(held)}
    command = ("train", "run.yaml", f"storage.root={root}", *overrides)
    process = place.start(*command, **points, **environment)
    wait_until(lambda: held.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    return process, held


def as_if_elsewhere(run: Path) -> None:
    """The lease's holder was on another host: nobody can know that it is only stopped."""
    claim = max((run / "lease").glob("*.json"))
    record = json.loads(claim.read_text())
    record["process"]["boot"] = "another"
    claim.write_text(json.dumps(record))


@pytest.mark.slow
def test_a_driver_that_is_stopped_replaced_and_continued_harms_nothing(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    stale, held = start(workplace, tmp_path, "1/rollout/in")
    os.kill(stale.pid, signal.SIGSTOP)
    as_if_elsewhere(tmp_path / "a")
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


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run but those of its lease."""
    files = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "lease"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def generated_ahead(run: Path) -> bool:
    """Whether the iterations that are open beside the one that is held have all that they can have before it is trained."""
    filtered = [run / f"iterations/{index:06d}/results/filter.json" for index in OPEN[1:]]
    return all(path.exists() for path in filtered)


@pytest.mark.slow
def test_a_driver_is_replaced_while_several_iterations_are_open_and_writes_nothing_after_it(
    workplace: Workplace, tmp_path: Path
) -> None:
    """Both wait before the same train step, and the stale one goes on with it first."""
    (workplace.folder / forms.TAILED).write_text(forms.tailed_rows())
    ahead = [*forms.overrides("ahead"), "pipeline.ahead=2", "run.iterations=5"]
    workplace.train(tmp_path / "whole", *ahead)
    root, run, point = tmp_path / "taken", tmp_path / "taken" / "a", f"{OPEN[0]}/train_step/before"
    root.mkdir()
    with ExitStack() as stack:
        stale, held = start(workplace, root, point, *ahead)
        stack.callback(stale.kill)
        wait_until(lambda: generated_ahead(run))
        manifests = [run / f"iterations/{index:06d}/manifest.json" for index in (0, *OPEN)]
        assert [path.exists() for path in manifests] == [True, False, False, False]
        refused = workplace.train(root, *ahead, expect=2)
        assert f"driven by process {stale.pid}" in " ".join(refused.split())
        assert stale.poll() is None
        os.kill(stale.pid, signal.SIGSTOP)
        as_if_elsewhere(run)
        again = root / "held-again"
        successor, _ = start(workplace, root, point, *ahead, held=again, MILLRACE_LEASE_S="3")
        stack.callback(successor.kill)
        os.kill(successor.pid, signal.SIGSTOP)  # now only the stale one could write
        before = contents(run)
        held.unlink()
        os.kill(stale.pid, signal.SIGCONT)
        out = output_of(stale)
        assert stale.returncode == 2, out
        assert f"taken over by process {successor.pid} on " in out
        assert contents(run) == before
        again.unlink()
        os.kill(successor.pid, signal.SIGCONT)
        out = output_of(successor)
        assert successor.returncode == 0, out
    assert "no sign of life of process" in out
    assert "rebuilding" not in out  # the stale driver has ended none of its actors
    assert "starting it again" not in out
    assert not promises.faulted_by_commands(workplace, run)
    assert not promises.different_numbers(tmp_path / "whole" / "a", run)
    assert final_weights(run) == final_weights(tmp_path / "whole" / "a")


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
