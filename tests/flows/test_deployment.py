"""The deployment under a real worker: Retry of a run whose process was killed, and a new run under the same name, both go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.support.flow_runs import Workplace, configuration, final_weights, trained, wait_until

REPOSITORY = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]


class Deployed:
    """Prefect's own commands and API at the workplace's server, with a worker that runs what is asked for."""

    def __init__(self, workplace: Workplace) -> None:
        self.api = workplace.api
        self.environment = {
            **workplace.environment,
            "PREFECT_API_URL": self.api,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        }
        self.worker: psutil.Process | None = None

    def prefect(self, *arguments: str) -> str:
        """Run a prefect command in the checkout."""
        done = subprocess.run(
            [*PREFECT, *arguments],
            cwd=REPOSITORY,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request to the server's API."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.api}{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def start(self, config: dict[str, Any]) -> str:
        """Id of a new flow run of the deployment train/train."""
        self.prefect("deployment", "run", "train/train", "--params", json.dumps({"config": config}))
        deployment = self.ask("/deployments/name/train/train")["id"]
        runs = self.ask("/flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}})
        newest = max(runs, key=lambda run: run["created"])
        return str(newest["id"])

    def state(self, flow_run: str) -> str:
        """Type of a flow run's state."""
        return str(self.ask(f"/flow_runs/{flow_run}")["state_type"])


@pytest.fixture(scope="module")
def deployed(workplace: Workplace) -> Iterator[Deployed]:
    here = Deployed(workplace)
    here.prefect("work-pool", "create", "local", "--type", "process")
    here.prefect("deploy", "--all")
    worker = subprocess.Popen(
        [*PREFECT, "worker", "start", "--pool", "local"],
        cwd=REPOSITORY,
        env=here.environment,
        stdout=(workplace.folder / "worker.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    here.worker = psutil.Process(worker.pid)
    yield here
    os.killpg(worker.pid, signal.SIGKILL)  # asked politely it may wait for its last run's process for minutes
    worker.wait()


@pytest.fixture
def config(workplace: Workplace, tmp_path: Path) -> dict[str, Any]:
    """The configuration of the uninterrupted run, with absolute paths and a storage root of its own."""
    values = configuration()
    values["storage"] = {"root": str(tmp_path)}
    values["model"]["path"] = str(workplace.folder / "model")
    values["data"]["sources"][0]["path"] = str(workplace.folder / "train.jsonl")
    values["evaluation"]["sets"][0]["path"] = str(workplace.folder / "held_out.jsonl")
    return values


def flow_process(deployed: Deployed) -> psutil.Process:
    """The one process that the worker runs a flow in."""
    assert deployed.worker is not None
    (found,) = deployed.worker.children()
    return found


def test_retry_of_a_killed_run_and_a_new_run_of_its_name_go_on(
    deployed: Deployed, config: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "a"
    first = deployed.start(config)
    wait_until(lambda: (run / "iterations/000000/manifest.json").exists())
    flow_process(deployed).kill()
    wait_until(lambda: deployed.state(first) == "CRASHED")
    assert len(trained(run)) < len(trained(whole))

    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    deployed.ask(f"/flow_runs/{first}/set_state", {"state": state, "force": True})
    wait_until(lambda: deployed.state(first) in ("COMPLETED", "FAILED", "CRASHED") and retried(run))
    wait_until(lambda: deployed.state(first) != "RUNNING")
    assert deployed.state(first) == "COMPLETED"
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["flow_run_id"] for attempt in attempts] == [first, first]

    again = deployed.start(config)
    assert again != first
    wait_until(lambda: deployed.state(again) in ("COMPLETED", "FAILED", "CRASHED"))
    assert deployed.state(again) == "COMPLETED"
    assert trained(run) == trained(whole)


def retried(run: Path) -> bool:
    """Whether a second attempt has begun."""
    return len(json.loads((run / "run.json").read_text())["attempts"]) == 2
