"""Prefect's page of a run that was started from Python, with none of the settings of millrace's command: log, tags, artifacts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow_runs import Workplace, wait_until

OWN = """
import asyncio, sys
from millrace.core.config.reading.load import load_config
from millrace.flows.train import train
from millrace.tasks import report
report.PROGRESS_EVERY_S = 0.0  # of rollouts, which are short here
asyncio.run(train(load_config("run.yaml", sys.argv[1:])))
"""
TAGS = {"run:own", "preset:grpo", "model:model"}


@pytest.fixture(scope="module")
def root(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the run `own`, started by `asyncio.run(train(config))`: two iterations, then a third."""
    root = tmp_path_factory.mktemp("own")
    login = {"PREFECT_API_URL": workplace.api, "PREFECT_API_AUTH_STRING": workplace.login}
    for iterations in (2, 3):
        settings = [
            "run.name=own",
            f"run.iterations={iterations}",
            f"storage.root={root}",
            "tracking.trackers=[]",
        ]
        done = subprocess.run(
            [sys.executable, "-c", OWN, *settings],
            cwd=workplace.folder,
            env={**workplace.environment, **login},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture(scope="module")
def flow_runs(workplace: Workplace, root: Path) -> list[dict[str, Any]]:
    """The flow runs of both starts and of their iterations, as they began."""
    of_run = {"flow_runs": {"tags": {"all_": ["run:own"]}}, "sort": "START_TIME_ASC"}
    found: list[dict[str, Any]] = workplace.ask("/flow_runs/filter", of_run)
    return found


def log_of(workplace: Workplace, run: dict[str, Any], holds: Callable[[list[str]], bool]) -> list[str]:
    """Lines of a flow run's page. Prefect's client sends them a little later."""
    lines: list[str] = []

    def there() -> bool:
        query = {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "sort": "TIMESTAMP_ASC"}
        lines[:] = [line["message"] for line in workplace.ask("/logs/filter", query)]
        return holds(lines)

    wait_until(there, patience_s=60)
    return lines


def test_every_flow_run_has_tags_and_no_task_run_has(
    workplace: Workplace, flow_runs: list[dict[str, Any]]
) -> None:
    names = ["own", "own, iteration 1", "own, iteration 2", "own", "own, iteration 3"]
    assert [run["name"] for run in flow_runs] == names
    assert all(set(run["tags"]) == TAGS for run in flow_runs)
    ids = [run["id"] for run in flow_runs if run["name"] != "own"]
    tasks = workplace.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": ids}}})
    assert {"rollout", "publish"} <= {task["name"].rpartition("-")[0] for task in tasks}
    assert all(task["tags"] == [] for task in tasks)


def test_the_log_is_on_the_pages_of_the_run_and_of_its_iterations(
    workplace: Workplace, flow_runs: list[dict[str, Any]]
) -> None:
    first, one, _, second, three = flow_runs
    complete = [f"run own is complete: {iterations} iterations" for iterations in (2, 3)]
    for run, done, ended in ((first, 0, complete[0]), (second, 2, complete[1])):
        lines = log_of(workplace, run, lambda found, ended=ended: ended in found)  # type: ignore[misc]
        iterations = 2 if run is first else 3
        assert any(
            line.startswith(f"run own: {done} of {iterations} iterations are complete") for line in lines
        )
        shown = [line.partition(":")[0] for line in lines if line.startswith("iteration ")]
        assert shown == [f"iteration {number} of {iterations}" for number in range(done + 1, iterations + 1)]
    for run, name in ((one, "iteration 1 of 2: reward"), (three, "iteration 3 of 3: reward")):
        lines = log_of(workplace, run, bool)
        assert sum(line.startswith(name) for line in lines) == 1


def test_the_run_and_each_iteration_have_their_artifacts(
    workplace: Workplace, flow_runs: list[dict[str, Any]]
) -> None:
    def artifacts(run: dict[str, Any]) -> dict[str, Any]:
        query = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}}
        found = [item for item in workplace.ask("/artifacts/filter", query) if item["key"]]
        kinds = [item["key"].rpartition("-")[2] for item in found]
        assert len(set(kinds)) == len(kinds)
        return dict(zip(kinds, found, strict=True))

    *_, second, three = flow_runs
    of_run, of_iteration = artifacts(second), artifacts(three)
    assert set(of_run) == {"progress", "run", "curves"}
    assert of_run["progress"]["data"] == 100.0
    assert "# own: 3 of 3" in of_run["run"]["data"]
    assert "reward/mean after iteration 1 and later:" in of_run["run"]["data"]  # of the first start too
    assert "| held_out/reward_mean |" in of_run["run"]["data"]
    assert "(before training)" in of_run["run"]["data"]
    assert "| trained |" in of_run["run"]["data"]
    assert of_run["curves"]["data"].startswith("data:image/png;base64,")
    assert set(of_iteration) == {"rollout", "iteration", "samples"}
    assert "**Best**" in of_iteration["samples"]["data"]
    assert "| trained |" in of_iteration["samples"]["data"]
    assert of_iteration["rollout"]["data"] == 100.0
    assert "train_step" in of_iteration["iteration"]["data"]
    assert "█" in of_iteration["iteration"]["data"]
