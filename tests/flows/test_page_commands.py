"""The commands of the pages on Prefect and on curves, in a project's folder: deployments, runs, a schedule, pools, the addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deployed import Deployed
from tests.support.doc_commands import blocks
from tests.support.flow_runs import Workplace, configuration, output_of

pytestmark = pytest.mark.slow


class Shell:
    """A shell in a project's folder, in which a line that exports variables holds for the lines after it."""

    def __init__(self, workplace: Workplace, folder: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**workplace.environment, "PATH": path}
        self.folder = folder
        self.before: list[str] = []

    def types(self, line: str) -> list[str]:
        script = "\n".join(["set -e", *self.before, line])
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        out = output_of(process)
        assert process.returncode == 0, out
        return out.splitlines()


@pytest.fixture
def shell(workplace: Workplace, tmp_path: Path) -> Shell:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration()))
    return Shell(workplace, tmp_path)


def deployment(server: Deployed, name: str) -> Any:
    return server.ask(f"/deployments/name/{name}")


def started(server: Deployed, name: str) -> Any:
    """The one flow run of a deployment, which is cancelled."""
    query = {"deployments": {"id": {"any_": [deployment(server, name)["id"]]}}}
    (found,) = server.ask("/flow_runs/filter", query)
    server.ask(f"/flow_runs/{found['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    return found


def test_the_page_on_prefect(shell: Shell, workplace: Workplace, tmp_path: Path) -> None:
    server = Deployed(workplace.api, workplace.login, workplace.environment, tmp_path)
    lines = [line for block in blocks("prefect", "sh") for line in block.splitlines()]
    deploy_file, deploy, run_recipe, run_file, schedule, docker, kubernetes = lines
    (printed,) = blocks("prefect", "text")
    for line, names in ((deploy_file, ["train/a"]), (deploy, ["train/grpo"])):
        said = shell.types(line)
        assert [word.split("=")[0] for word in said[-2:]] == [
            word.split("=")[0] for word in printed.splitlines()
        ]
        for name in ("train/train", "train/file", "sft/sft", *names):
            assert name in said[-4]
            assert deployment(server, name)["pull_steps"][0].popitem()[1] == {"directory": str(tmp_path)}
    shell.before.append(said[-2])

    shell.types(run_recipe)
    assert started(server, "train/grpo")["parameters"]["overrides"] == ["run.name=b", "run.iterations=3"]
    shell.types(run_file)
    overrides = ["run.name=b", "run.iterations=300"]
    assert started(server, "train/file")["parameters"] == {"path": "run.yaml", "overrides": overrides}

    shell.types(schedule)
    shell.types(deploy_file)  # which keeps the schedule
    (made,) = deployment(server, "train/a")["schedules"]
    assert (made["schedule"]["cron"], made["schedule"]["timezone"]) == ("0 * * * *", "Europe/Berlin")
    assert made["active"]

    for line, pool, variables in (
        (
            docker,
            "docker",
            {"network_mode": "host", "volumes": [f"{tmp_path}:{tmp_path}", "/dev/shm:/dev/shm"]},
        ),
        (kubernetes, "cluster", {"namespace": "default", "finished_job_ttl": 3600}),
    ):
        assert shell.types(line)[-1] == f"prefect worker start --pool {pool}"
        there = deployment(server, "train/a")
        assert there["work_pool_name"] == pool
        assert there["job_variables"]["image"] == "registry.example/millrace:1"
        assert variables.items() <= there["job_variables"].items()
        known = server.ask(f"/work_pools/{pool}")["base_job_template"]["variables"]["properties"]
        assert set(there["job_variables"]) <= set(known)
    server.prefect("deployment", "delete", "train/a")


def test_the_page_on_mlflow(shell: Shell, workplace: Workplace) -> None:
    listed = blocks("looking#curves", "sh")[0].splitlines()[0]
    *_, prefect, mlflow, export = shell.types(listed)
    assert prefect.split()[:2] == ["Prefect", workplace.api.removesuffix("/api")]
    assert mlflow.startswith("MLflow   http://127.0.0.1:")
    assert export.startswith(f"export PREFECT_API_URL={workplace.api} ")
