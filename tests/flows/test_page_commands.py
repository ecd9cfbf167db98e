"""The commands of the pages on Prefect and MLflow, in a project's folder: deployments, a run of a file, a schedule, the addresses."""

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
from tests.support.flow_runs import PATIENCE_S, Workplace, configuration

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
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout.splitlines()


@pytest.fixture
def shell(workplace: Workplace, tmp_path: Path) -> Shell:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration()))
    return Shell(workplace, tmp_path)


def deployment(server: Deployed, name: str) -> Any:
    return server.ask(f"/deployments/name/{name}")


def test_the_page_on_prefect(shell: Shell, workplace: Workplace, tmp_path: Path) -> None:
    server = Deployed(workplace.api, workplace.login, workplace.environment, tmp_path)
    deploy, run, schedule = (block.strip() for block in blocks("prefect-page", "sh"))
    (printed,) = blocks("prefect-page", "text")
    said = shell.types(deploy)
    assert [line.split("=")[0] for line in said[-2:]] == [line.split("=")[0] for line in printed.splitlines()]
    shell.before.append(said[-2])
    for name in ("train/train", "train/file", "sft/sft"):
        assert name in " ".join(said)
        assert deployment(server, name)["pull_steps"][0].popitem()[1] == {"directory": str(tmp_path)}

    shell.types(run)
    file = deployment(server, "train/file")["id"]
    (started,) = server.ask("/flow_runs/filter", {"deployments": {"id": {"any_": [file]}}})
    overrides = ["run.name=b", "run.iterations=300"]
    assert started["parameters"] == {"path": "run.yaml", "overrides": overrides}
    server.ask(f"/flow_runs/{started['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})

    (hourly,) = blocks("prefect-page", "yaml")
    (tmp_path / "hourly.yaml").write_text(hourly)
    shell.types(schedule)
    made = deployment(server, "train/hourly")
    assert [item["schedule"]["cron"] for item in made["schedules"]] == ["0 * * * *"]
    assert made["parameters"]["path"] == "run.yaml"
    server.prefect("deployment", "delete", "train/hourly")


def test_the_page_on_mlflow(shell: Shell, workplace: Workplace) -> None:
    listed = blocks("mlflow", "sh")[0].splitlines()[0]
    *_, prefect, mlflow, export = shell.types(listed)
    assert prefect.split()[:2] == ["Prefect", workplace.api.removesuffix("/api")]
    assert mlflow.startswith("MLflow   http://127.0.0.1:")
    assert export.startswith(f"export PREFECT_API_URL={workplace.api} ")
