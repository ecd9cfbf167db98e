"""A run that lives or is paused is not taken for lost; one whose host is gone is, and is resumed. So is one that a worker took
and never started. The automations wait less here."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.support.deployed import Deployed, flow_process
from tests.support.flow_runs import Workplace, final_weights, trained, wait_until

pytestmark = pytest.mark.slow

WITHIN_S = 75  # two heartbeats of 30 s, and more
LOOKS_S = 60  # the server looks every few seconds; the machine may be busy


@pytest.fixture
def server(own_deployments: Deployed) -> Deployed:
    """What `millrace deploy` made, but that a run is lost, or was never started, after less."""
    for item in own_deployments.ask("/automations/filter", {}):
        if item["name"] in ("millrace, mark lost runs", "millrace, submit runs again"):
            changed = {name: item[name] for name in ("name", "description", "enabled", "actions")}
            changed["trigger"] = {**item["trigger"], "within": WITHIN_S}
            own_deployments.ask(f"/automations/{item['id']}", changed, "PUT")
    return own_deployments


def states(server: Deployed, flow_run: str) -> list[str]:
    """Names of the states that a flow run was in."""
    return [state["name"] for state in server.ask(f"/flow_run_states/?flow_run_id={flow_run}")]


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_only_a_run_whose_host_is_gone_is_taken_for_lost_and_it_resumes(
    server: Deployed, workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    run, held = tmp_path / "a", tmp_path / "held"
    parameters = {"path": "run.yaml", "overrides": [f"storage.root={tmp_path}"]}
    started = server.start_deployment(
        "train/a", parameters, MILLRACE_KILL_POINT="1/train_step/before", MILLRACE_KILL_POINT_FILE=str(held)
    )
    wait_until(held.exists)
    time.sleep(2 * WITHIN_S)
    assert server.state(started) == "RUNNING"
    assert "Crashed" not in states(server, started)

    process = flow_process(server)
    paused = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
    server.ask(f"/flow_runs/{started}/set_state", {"state": paused, "force": True})
    wait_until(lambda: gone(process), 60)
    held.unlink()
    time.sleep(WITHIN_S + LOOKS_S)
    assert server.ask(f"/flow_runs/{started}")["state_name"] == "Suspended"
    server.ask(f"/flow_runs/{started}/resume", {})
    wait_until(held.exists)
    time.sleep(5)  # for the first heartbeat to arrive

    process = flow_process(server)
    server.kill_worker()  # first, so that nobody sees the process end
    process.kill()
    killed = time.monotonic()
    server.wait_until(lambda: "Crashed" in states(server, started), WITHIN_S + LOOKS_S)
    assert time.monotonic() - killed > WITHIN_S - 35
    server.wait_until(lambda: server.state(started) == "SCHEDULED", 20 + LOOKS_S)
    held.unlink()
    server.start_worker(workplace.folder / "second-worker.log")
    wait_until(held.exists)
    held.unlink()
    assert server.wait(started) == "COMPLETED"
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)


def test_a_run_that_a_worker_took_and_never_started_is_handed_out_again(
    server: Deployed, workplace: Workplace, tmp_path: Path
) -> None:
    server.kill_worker()
    parameters = {"path": "run.yaml", "overrides": [f"storage.root={tmp_path}", "run.iterations=1"]}
    taken = server.start_deployment("train/a", parameters)
    server.ask(f"/flow_runs/{taken}/set_state", {"state": {"type": "PENDING"}})  # as a worker does, that dies
    server.start_worker(workplace.folder / "third-worker.log")
    server.wait_until(lambda: "AwaitingRetry" in states(server, taken), WITHIN_S + LOOKS_S)
    assert server.wait(taken) == "COMPLETED"
    assert states(server, taken).count("Pending") == 2
    assert (tmp_path / "a/iterations/000000/manifest.json").exists()
