"""The deployments on a real worker: Retry resumes a run whose process was killed, and so does a new run of its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from millrace.core.config.reading.load import load_config
from tests.soak.victims import processes
from tests.support.deployed import Deployed, flow_process
from tests.support.flow_runs import Workplace, configuration, final_weights, trained, wait_until

REWARD = """
from millrace.core.rewards.text import contains


def score(sample):
    return contains(sample)
"""


@pytest.fixture
def project(workplace: Workplace, tmp_path: Path) -> Path:
    """The YAML file of the uninterrupted run in a folder of its own, with what it names and its reward beside it."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("model", "train.jsonl", "held_out.jsonl"):
        (folder / name).symlink_to(workplace.folder / name)
    (folder / "beside_the_file.py").write_text(REWARD)
    values = configuration()
    values["reward"]["function"] = "beside_the_file:score"
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


@pytest.fixture
def config(project: Path, tmp_path: Path) -> dict[str, Any]:
    """The same run as the form gives it: with absolute paths, and a storage root of its own."""
    return load_config(str(project), [f"storage.root={tmp_path}"]).model_dump(mode="json")


@pytest.mark.slow
def test_retry_resumes_a_killed_run_of_a_file_and_so_does_a_run_of_its_name_from_the_form(
    deployed: Deployed, project: Path, config: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "a"
    parameters = {"path": str(project), "overrides": [f"storage.root={tmp_path}"]}
    first = deployed.start_deployment("train/file", parameters)
    wait_until(lambda: (run / "iterations/000000/manifest.json").exists())
    flow_process(deployed).kill()
    wait_until(lambda: deployed.state(first) == "CRASHED")
    assert len(trained(run)) < len(trained(whole))

    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    deployed.ask(f"/flow_runs/{first}/set_state", {"state": state, "force": True})
    wait_until(lambda: retried(run))
    assert deployed.wait(first) == "COMPLETED"
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["flow_run_id"] for attempt in attempts] == [first, first]

    again = deployed.start(config)
    assert again != first
    assert deployed.wait(again) == "COMPLETED"
    assert trained(run) == trained(whole)


@pytest.mark.slow
def test_a_flow_run_cancelled_in_its_work_ends_with_its_actors(
    deployed: Deployed, workplace: Workplace, config: dict[str, Any], tmp_path: Path
) -> None:
    started = deployed.start(config)
    wait_until(lambda: any((tmp_path / "a").glob("iterations/000000/rollouts/part-*")))
    process, home = flow_process(deployed), Path(workplace.environment["MILLRACE_HOME"])
    assert processes("engine", process.pid, home)
    deployed.ask(f"/flow_runs/{started}/set_state", {"state": {"type": "CANCELLING"}})
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    wait_until(lambda: not any(processes(part, process.pid, home) for part in ("trainer", "engine")), 30)
    assert deployed.wait(started) == "CANCELLED"


def retried(run: Path) -> bool:
    """Whether a second attempt has begun."""
    return len(json.loads((run / "run.json").read_text())["attempts"]) == 2
