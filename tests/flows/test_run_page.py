"""Prefect's page of a run: log, tags, artifacts. A run started from Python has them too, with none of the settings of the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow_runs import Workplace, wait_until

OWN = """
import asyncio, sys
from millrace.core.config.reading.load import load_config
from millrace.flows.train import train
from millrace.tasks.reporting import report
report.PROGRESS_EVERY_S = 0.0  # of rollouts, which are short here
asyncio.run(train(load_config("run.yaml", sys.argv[1:])))
"""


@dataclass
class Shown:
    """A complete run of three iterations, how many were complete at each start and its end, and its flow runs in order."""

    name: str
    starts: list[tuple[int, int]]
    flow_runs: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        """Of the flow runs."""
        runs = [
            [self.name, *(f"{self.name}, iteration {number}" for number in range(done + 1, last + 1))]
            for done, last in self.starts
        ]
        return [name for names in runs for name in names]


@pytest.fixture(scope="module", params=["whole", pytest.param("own", marks=pytest.mark.slow)])
def shown(request: pytest.FixtureRequest, workplace: Workplace) -> Shown:
    """The run `a` of the command line, or `own`, started by `asyncio.run(train(config))`: two iterations, then a third."""
    run: Path = request.getfixturevalue(request.param)
    record = json.loads((run / "run.json").read_text())
    starts = [attempt["flow_run_url"].rpartition("/")[2] for attempt in record["attempts"]]
    found = [
        flow_run
        for of_start in ({"id": {"any_": starts}}, {"parent_flow_run_id": {"any_": starts}})
        for flow_run in workplace.ask("/flow_runs/filter", {"flow_runs": of_start})
    ]
    began = [(0, 3)] if len(starts) == 1 else [(0, 2), (2, 3)]
    return Shown(run.name, began, sorted(found, key=lambda flow_run: str(flow_run["start_time"])))


@pytest.fixture(scope="module")
def own(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    return root / "own"


def log_of(workplace: Workplace, run: dict[str, Any], holds: Callable[[list[str]], bool]) -> list[str]:
    """Lines of a flow run's page. Prefect's client sends them a little later."""
    lines: list[str] = []

    def there() -> bool:
        query = {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "sort": "TIMESTAMP_ASC"}
        lines[:] = [line["message"] for line in workplace.ask("/logs/filter", query)]
        return holds(lines)

    wait_until(there, patience_s=60)
    return lines


def test_every_flow_run_has_tags_and_no_task_run_has(workplace: Workplace, shown: Shown) -> None:
    assert [run["name"] for run in shown.flow_runs] == shown.names
    tags = {f"run:{shown.name}", "preset:grpo", "model:model"}
    assert all(set(run["tags"]) == tags for run in shown.flow_runs)
    ids = [run["id"] for run in shown.flow_runs if run["name"] != shown.name]
    tasks = workplace.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": ids}}})
    assert {"rollout", "publish"} <= {task["name"].rpartition("-")[0] for task in tasks}
    assert all(task["tags"] == [] for task in tasks)


def test_the_log_is_on_the_pages_of_the_run_and_of_its_iterations(workplace: Workplace, shown: Shown) -> None:
    starts = [run for run in shown.flow_runs if run["name"] == shown.name]
    for run, (done, last) in zip(starts, shown.starts, strict=True):
        ended = f"run {shown.name} is complete: {last} iterations"
        lines = log_of(workplace, run, lambda found, ended=ended: ended in found)  # type: ignore[misc]
        first = f"run {shown.name}: {done} of {last} iterations are complete"
        assert any(line.startswith(first) for line in lines)
        told = [line.partition(":")[0] for line in lines if line.startswith("iteration ")]
        assert told == [f"iteration {number} of {last}" for number in range(done + 1, last + 1)]
    for number, last in ((1, shown.starts[0][1]), (3, 3)):
        (run,) = [run for run in shown.flow_runs if run["name"] == f"{shown.name}, iteration {number}"]
        lines = log_of(workplace, run, bool)
        assert sum(line.startswith(f"iteration {number} of {last}: reward") for line in lines) == 1


def test_the_run_and_each_iteration_have_their_artifacts(workplace: Workplace, shown: Shown) -> None:
    def artifacts(name: str) -> dict[str, Any]:
        run = [run for run in shown.flow_runs if run["name"] == name][-1]
        query = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}}
        found = [item for item in workplace.ask("/artifacts/filter", query) if item["key"]]
        kinds = [item["key"].rpartition("-")[2] for item in found]
        assert len(set(kinds)) == len(kinds)
        return dict(zip(kinds, found, strict=True))

    of_run, of_iteration = artifacts(shown.name), artifacts(f"{shown.name}, iteration 3")
    assert set(of_run) == {"progress", "run", "curves"}
    assert of_run["progress"]["data"] == 100.0
    assert f"# {shown.name}: 3 of 3" in of_run["run"]["data"]
    assert "reward/mean after iteration 1 and later:" in of_run["run"]["data"]  # of the first start too
    assert "| held_out/reward_mean |" in of_run["run"]["data"]
    assert "(before training)" in of_run["run"]["data"]
    assert "| trained |" in of_run["run"]["data"]
    assert of_run["curves"]["data"].startswith("data:image/png;base64,")
    assert set(of_iteration) - {"rollout"} == {"iteration", "samples"}
    assert "**Best**" in of_iteration["samples"]["data"]
    assert "| trained |" in of_iteration["samples"]["data"]
    if shown.name == "own":  # whose rollouts tell their progress at once
        assert of_iteration["rollout"]["data"] == 100.0
    assert "train_step" in of_iteration["iteration"]["data"]
    assert "█" in of_iteration["iteration"]["data"]
