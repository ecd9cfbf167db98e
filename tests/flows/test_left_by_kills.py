"""What `kill -9` of a driver leaves: actors that nobody goes on with, and flow runs that Prefect still shows at work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.flow_runs import Patience, Workplace, output_of, wait_until

FAILS = """
def score(sample):
    if sample.response not in ("", sample.label):  # which a check asks for
        raise ValueError("no score")
    return 0.0
"""
SHORT = ["run.iterations=1", "evaluation.sets=[]"]
RUNNING = {"state": {"type": {"any_": ["RUNNING"]}}}


def actors_of(home: Path) -> set[int]:
    """Pids of all actors on the Ray head of a MILLRACE_HOME."""
    pids = set()
    for process in psutil.process_iter():
        try:
            if "ray::Host" in " ".join(process.cmdline()) and str(home) in process.environ().values():
                pids.add(process.pid)
        except psutil.Error:
            continue
    return pids


def kill_amid(place: Workplace, root: Path, point: str = "0/rollout/in") -> set[int]:
    """Start the run `a` and `kill -9` its driver, amid its first rollout; returns the actors of the home, which it leaves."""
    held = root / "held"
    points = {"MILLRACE_KILL_POINT": point, "MILLRACE_KILL_POINT_FILE": str(held)}
    driver = place.start("train", "run.yaml", f"storage.root={root}", *SHORT, **points)
    wait_until(lambda: held.exists() or driver.poll() is not None)
    assert driver.poll() is None, driver.communicate()[0]
    os.kill(driver.pid, signal.SIGKILL)
    output_of(driver)
    held.unlink()
    left = actors_of(place.folder / "home")
    assert left
    return left


def at_work(place: Workplace, kind: str, query: dict[str, Any]) -> list[Any]:
    """What Prefect still shows at work when patience ends; returns at once if that is nothing. The server records states late."""
    patience = Patience(60)
    while (found := place.ask(f"/{kind}/filter", query)) and patience.left:
        time.sleep(0.5)
    return [(each["name"], each["state"], each.get("flow_run_id")) for each in found]


@pytest.mark.slow
def test_what_killed_drivers_left_ends_at_the_next_start_or_stop_and_prefect_shows_none_at_work(
    workplace: Workplace, tmp_path: Path
) -> None:
    home = workplace.folder / "home"
    before = actors_of(home)
    of_moved = kill_amid(workplace, tmp_path) - before
    (tmp_path / "a").rename(tmp_path / "b")
    of_removed = kill_amid(workplace, tmp_path) - before - of_moved
    assert of_removed
    assert not of_moved & actors_of(home)  # ended by the second start
    shutil.rmtree(tmp_path / "a")
    out = workplace.call("stop", "a", "--root", str(tmp_path))
    assert f"actors of a ({tmp_path}/a) ended, which a killed driver left" in out
    assert not of_removed & actors_of(home)
    assert "no such run" in workplace.call("stop", "a", "--root", str(tmp_path), expect=2)
    assert "nothing was left by killed drivers" in workplace.call("stop")

    kill_amid(workplace, tmp_path)
    assert "killed after its start" in workplace.call("runs", "--root", str(tmp_path))
    out = workplace.train(tmp_path, *SHORT)
    assert "which a killed driver left" not in out  # its own actors were taken over
    names = {"name": {"like_": "a"}}
    for kind in ("flow_runs", "task_runs"):
        assert at_work(workplace, kind, {"flow_runs": names, kind: RUNNING}) == []
    crashed = {**names, "state": {"type": {"any_": ["CRASHED"]}}}
    messages = [run["state"]["message"] for run in workplace.ask("/flow_runs/filter", {"flow_runs": crashed})]
    assert sum("its run folder is gone" in message for message in messages) >= 2
    assert any("The run goes on as flow run a" in message for message in messages)
    assert actors_of(home) == before
    assert "complete" in workplace.call("runs", "--root", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["1/finish/before", "1/finish/in", "1/finish/after"])
def test_a_driver_killed_as_it_marks_its_run_complete_leaves_nothing_after_the_same_command(
    workplace: Workplace, tmp_path: Path, point: str
) -> None:
    """The same command said that the run is complete, and left engine and trainer, and MLflow at RUNNING."""
    from mlflow.tracking import MlflowClient

    home = workplace.folder / "home"
    before = actors_of(home)
    assert kill_amid(workplace, tmp_path, point) - before
    out = workplace.train(tmp_path, *SHORT)
    assert "run a: 1 iterations complete, 0 of them now" in out
    assert actors_of(home) == before
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert record["completed"]
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    assert client.get_run(record["mlflow_run_id"]).info.status == "FINISHED"
    names = {"name": {"like_": "a"}}
    assert at_work(workplace, "flow_runs", {"flow_runs": {**names, **RUNNING}}) == []
    assert "complete" in workplace.call("runs", "--root", str(tmp_path))


@pytest.mark.slow
def test_a_moved_run_that_goes_on_ends_the_actors_that_it_left_where_it_was(
    workplace: Workplace, tmp_path: Path
) -> None:
    home, moved = workplace.folder / "home", tmp_path / "moved"
    before = actors_of(home)
    left = kill_amid(workplace, tmp_path) - before
    assert left
    moved.mkdir()
    (tmp_path / "a").rename(moved / "a")
    assert "1 iterations complete" in workplace.train(moved, *SHORT, MILLRACE_LEASE_S="6")
    assert actors_of(home) == before


@pytest.mark.slow
def test_runs_and_show_say_that_a_start_failed_and_why(workplace: Workplace, tmp_path: Path) -> None:
    (workplace.folder / "raises.py").write_text(FAILS)
    workplace.train(tmp_path, *SHORT, "reward.function=raises:score", expect=2)
    assert "failed" in workplace.call("runs", "--root", str(tmp_path))
    assert "no score" in workplace.call("show", "a", "--root", str(tmp_path))


@pytest.mark.slow
def test_ctrl_c_is_cancelled_by_whom_on_every_page(workplace: Workplace, tmp_path: Path) -> None:
    driver = workplace.start(
        "train", "run.yaml", f"storage.root={tmp_path}", "run.iterations=200", *SHORT[1:]
    )
    first = tmp_path / "a" / "iterations" / "000000" / "manifest.json"
    wait_until(lambda: first.exists() or driver.poll() is not None)
    driver.send_signal(signal.SIGINT)
    out = output_of(driver)
    assert driver.returncode == 130, out
    shown = workplace.call("show", "a", "--root", str(tmp_path))
    assert "stopped by Ctrl-C" in shown
    assert "of 200 iterations" in shown
    query = {"sort": "START_TIME_DESC", "limit": 1, "flow_runs": {"name": {"any_": ["a"]}}}
    (run,) = workplace.ask("/flow_runs/filter", query)
    assert run["state_type"] == "CANCELLED"
    assert run["state"]["message"].startswith("Ended by Ctrl-C.")
    below = {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}}
    states = {each["state_type"] for each in workplace.ask("/flow_runs/filter", below)}
    assert states <= {"COMPLETED", "CANCELLED"}
