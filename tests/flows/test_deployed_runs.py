"""Runs of what `millrace deploy` made, on a real server and worker: a schedule, a second run of a name, losses, and what ends them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.soak.victims import kill
from tests.support.deployed import Deployed, flow_process
from tests.support.flow_runs import Workplace, final_weights, trained, wait_until

pytestmark = pytest.mark.slow  # some minutes of whole runs and processes

MANY = ["run.iterations=500", "evaluation.sets=[]"]
RESUMED_S = 300  # the automation waits for 20 s, and its server looks at it every few seconds; the machine may be busy


@pytest.fixture(scope="module")
def server(own_deployments: Deployed) -> Deployed:
    return own_deployments


def runs_of(server: Deployed, name: str) -> list[dict[str, Any]]:
    """Flow runs of a deployment, oldest first; those that a schedule has not started yet are left out."""
    deployment = server.ask(f"/deployments/name/{name}")["id"]
    query = {"deployments": {"id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
    found: list[dict[str, Any]] = server.ask("/flow_runs/filter", query)
    return [run for run in found if run["state_type"] != "SCHEDULED"]  # late ones too


def end(server: Deployed, flow_run: str) -> None:
    """Cancel a flow run, as the page does, and wait until it is."""
    server.ask(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    assert server.wait(flow_run) == "CANCELLED"


def test_deploy_makes_a_deployment_a_recipe_and_each_automation_once(server: Deployed, project: Path) -> None:
    server.millrace("deploy", "run.yaml", "--recipes")  # again
    listed = server.ask("/deployments/filter", {"limit": 100})
    found = {item["name"]: item for item in listed if "millrace" in item["tags"]}
    recipes = {path.stem for path in (Path(__file__).parents[2] / "deployments" / "recipes").glob("*.yaml")}
    assert {"train", "file", "sft", "convert", "a", *recipes} == set(found)
    assert {"run:dapo", "preset:dapo", "model:warm-model"} < set(found["dapo"]["tags"])
    assert found["dapo"]["parameters"]["config"]["algorithm"] == {"preset": "dapo"}
    for item in found.values():
        assert item["work_pool_name"] == "local"
        assert item["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
        assert item["pull_steps"][0].popitem()[1] == {"directory": str(project)}
    names = [item["name"] for item in server.ask("/automations/filter", {})]
    assert sorted(names) == [
        "millrace, mark lost runs",
        "millrace, resume runs",
        "millrace, submit runs again",
    ]


def test_a_schedule_fires_and_a_second_run_of_the_name_is_refused_while_the_first_lives(
    server: Deployed, tmp_path: Path
) -> None:
    deployment = server.ask("/deployments/name/train/a")["id"]
    parameters = {"path": "run.yaml", "overrides": [f"storage.root={tmp_path}", *MANY]}
    schedule = {"schedule": {"interval": 15}, "parameters": parameters}
    earlier = len(runs_of(server, "train/a"))  # other files' tests use the same server
    (made,) = server.ask(f"/deployments/{deployment}/schedules", [{**schedule, "active": True}])
    server.wait_until(lambda: len(runs_of(server, "train/a")) > earlier + 1)
    # now: where a process takes longer to start than the schedule to fire, ever more of them hold each other up
    server.ask(f"/deployments/{deployment}/schedules/{made['id']}", method="DELETE")
    wait_until(lambda: (tmp_path / "a/iterations/000000/manifest.json").exists())

    def by_state(name: str) -> list[dict[str, Any]]:
        return [run for run in runs_of(server, "train/a") if run["state_name"] == name]

    server.wait_until(lambda: len(by_state("Running")) == 1 and len(by_state("Refused")) > 0)
    (first,), refused = by_state("Running"), by_state("Refused")[0]
    assert first["auto_scheduled"]
    assert refused["state_type"] == "CANCELLED"
    assert "driven by process" in refused["state"]["message"]

    other = server.start_deployment("train/file", parameters)  # another deployment, the same run
    server.wait_until(lambda: server.ask(f"/flow_runs/{other}")["state_name"] == "Refused")
    apart = server.start_deployment(
        "train/a", {**parameters, "overrides": [*parameters["overrides"], "run.name=b"]}
    )
    wait_until(lambda: (tmp_path / "b/iterations/000000/manifest.json").exists())
    assert set(server.ask(f"/flow_runs/{apart}")["tags"]) >= {"millrace", "run:b"}
    assert "run:a" not in server.ask(f"/flow_runs/{apart}")["tags"]
    end(server, apart)
    assert server.state(first["id"]) == "RUNNING"
    end(server, first["id"])
    attempts = json.loads((tmp_path / "a/run.json").read_text())["attempts"]
    assert [attempt["flow_run_id"] for attempt in attempts] == [first["id"]]


def test_a_recipe_is_run_by_a_command_with_overrides(server: Deployed, tmp_path: Path) -> None:
    given = ["run.name=c", f"storage.root={tmp_path}", "run.iterations=1", "run.prepare=null"]
    given += [
        "model.path=model",
        "data.sources.0.path=train.jsonl",
        "evaluation.sets=[]",
        "rollout.prompts=8",
    ]
    given += ["trainer.global_batch=32", "rollout.samples_per_prompt=4"]
    server.prefect("deployment", "run", "train/quickstart", "-p", f"overrides={json.dumps(given)}")
    server.wait_until(lambda: len(runs_of(server, "train/quickstart")) == 1)
    (run,) = runs_of(server, "train/quickstart")
    assert server.wait(run["id"]) == "COMPLETED"
    now = server.ask(f"/flow_runs/{run['id']}")
    assert now["name"] == "c"
    assert set(now["tags"]) == {"millrace", "run:c", "preset:grpo", "model:model"}
    logs = server.ask("/logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}})
    assert any(line["message"].startswith("iteration 1 of 1: reward") for line in logs)


def test_a_killed_run_resumes_by_itself_and_one_that_was_stopped_does_not(
    server: Deployed, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "a"
    started = server.start_deployment(
        "train/a", {"path": "run.yaml", "overrides": [f"storage.root={tmp_path}"]}
    )
    wait_until(lambda: (run / "iterations/000000/manifest.json").exists())
    flow_process(server).kill()
    server.wait_until(lambda: server.state(started) == "CRASHED")
    server.wait_until(lambda: server.state(started) != "CRASHED", RESUMED_S)
    assert server.wait(started) == "COMPLETED"
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    assert server.ask(f"/flow_runs/{started}")["run_count"] == 2

    parameters = {"path": "run.yaml", "overrides": [f"storage.root={tmp_path}", "run.name=d", *MANY]}
    stopped = server.start_deployment("train/file", parameters)
    wait_until(lambda: (tmp_path / "d/iterations/000000/manifest.json").exists())
    assert "its flow run is cancelled" in server.millrace("stop", "d", "--root", str(tmp_path))
    time.sleep(45)
    assert server.state(stopped) == "CANCELLED"


def test_a_run_that_failed_by_the_loss_of_its_trainer_resumes_by_itself_and_a_mistake_does_not(
    server: Deployed, workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    wrong = server.start_deployment("train/a", {"path": "run.yaml", "overrides": ["model.path=nowhere"]})
    assert server.wait(wrong) == "FAILED"
    parameters = {"path": "run.yaml", "overrides": [f"storage.root={tmp_path}"]}
    started = server.start_deployment("train/a", parameters)
    wait_until(lambda: (tmp_path / "a/iterations/000000/manifest.json").exists())
    driver, home = flow_process(server).pid, Path(workplace.environment["MILLRACE_HOME"])
    while server.state(started) == "RUNNING":  # more often than its task is tried
        kill("trainer", driver, home)
    assert server.wait(started) == "FAILED"
    server.wait_until(lambda: server.state(started) not in ("FAILED", "SCHEDULED"), RESUMED_S)
    assert server.wait(started) == "COMPLETED"
    assert trained(tmp_path / "a") == trained(whole)
    assert server.state(wrong) == "FAILED"
