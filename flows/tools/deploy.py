"""`millrace deploy`: Prefect deployments of millrace, one for each recipe and each given file, to run from a folder of the user's.

Owns how a recipe becomes a deployment. deployments/ holds the rest: prefect.yaml the deployments for any run, pools/ what a
kind of work pool needs, automations.yaml what the server does by itself. Prefect's own commands do the work.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import yaml

from millrace.connectors.prefect.server import ensure_server, export_line
from millrace.connectors.storage.own_folders import temporary_folder
from millrace.core.config import RunConfig
from millrace.core.config.reading.files import read_files
from millrace.core.config.reading.load import load_config
from millrace.core.contracts.run_tags import run_tags
from millrace.core.errors import ConfigError, MillraceError

TAG = "millrace"  # of all deployments, by which automations know their runs
FILES = Path(str(resources.files("millrace.deployments")))


def create_deployments(
    folder: Path,
    files: Sequence[Path] = (),
    *,
    pool: str = "local",
    kind: str = "process",
    image: str | None = None,
) -> list[str]:
    """Create the work pool, unless it exists, the deployments and the automations; returns the lines that start a worker.

    Flow runs import from `folder` and resolve relative paths against it. files: YAML files of runs. image: for containers.
    """
    kinds = [file.stem for file in sorted((FILES / "pools").glob("*.yaml"))]
    if kind not in kinds:
        raise ConfigError(
            "is no kind of work pool", where=f"--type {kind}", remedy=f"give one of {', '.join(kinds)}"
        )
    if (image is None) != (kind == "process"):
        raise ConfigError(
            "runs are processes there" if image else "runs are containers there",
            where=f"--type {kind}",
            remedy="leave --image out" if image else "name an image that has millrace: --image IMAGE",
        )
    described = all_deployments(files, pool, kind)
    api = ensure_server()
    environment = {"PWD": str(folder), "MILLRACE_IMAGE": image or ""}
    if _prefect(environment, "work-pool", "inspect", pool).returncode:
        _must(_prefect(environment, "work-pool", "create", pool, "--type", kind))
    from millrace.connectors.prefect.automations import keep_automations
    from millrace.connectors.prefect.schedules import schedules_of

    schedules = asyncio.run(schedules_of(map(_shown_name, described["deployments"])))
    for item in described["deployments"]:
        item["schedules"] = schedules[_shown_name(item)]
    with temporary_folder("millrace-deploy") as own:
        file = Path(own) / "prefect.yaml"
        file.write_text(yaml.safe_dump(described, sort_keys=False))
        _must(_prefect(environment, "deploy", "--all", "--prefect-file", str(file)))
    asyncio.run(keep_automations(FILES / "automations.yaml"))
    names = ", ".join(_shown_name(item) for item in described["deployments"])
    return [
        f"Deployments: {names}",
        f"train/train and sft/sft are forms, train/file takes a YAML file. They run from {folder} once a worker runs:",
        export_line(api),
        f"prefect worker start --pool {pool}",
    ]


def all_deployments(files: Sequence[Path], pool: str, kind: str) -> dict[str, Any]:
    """What Prefect deploys: prefect.yaml with the deployments of recipes and files, all on one pool.

    Raises ConfigError for a file that is no configuration, and for two deployments of one name.
    """
    described: dict[str, Any] = yaml.safe_load((FILES / "prefect.yaml").read_text())
    del described["definitions"]
    recipes = sorted((FILES / "recipes").glob("*.yaml"))
    deployments = [*described["deployments"], *map(of_recipe, recipes), *map(of_file, files)]
    variables = yaml.safe_load((FILES / "pools" / f"{kind}.yaml").read_text())
    names = [_shown_name(item) for item in deployments]
    for item in deployments:
        item["work_pool"] = {"name": pool, "job_variables": variables}
        if names.count(_shown_name(item)) > 1:
            raise ConfigError(
                "there are two deployments of that name",
                where=_shown_name(item),
                remedy="change run.name of the file",
            )
    return {**described, "deployments": deployments}


def of_recipe(path: Path) -> dict[str, Any]:
    """The deployment of a recipe: a form that is filled in with what the recipe says, and with defaults elsewhere."""
    config = load_config(str(path))
    return {
        "name": path.stem,
        "entrypoint": "millrace.flows.from_file.train_recipe",
        "description": "\n".join(_comment(path)),
        "tags": _tags(config),
        "parameters": {"config": read_files(str(path)), "overrides": []},
    }


def of_file(path: Path) -> dict[str, Any]:
    """The deployment of a user's file, by the name of its run: each flow run reads the file as it is then."""
    config = load_config(str(path))
    return {
        "name": config.run.name,
        "entrypoint": "millrace.flows.from_file.train_file",
        "description": f"The run of {path}, which is read when it starts. The overrides are fields as behind `millrace train`.",
        "tags": _tags(config),
        "parameters": {"path": str(path), "overrides": []},
    }


def _tags(config: RunConfig) -> list[str]:
    return [TAG, *sorted(run_tags(config))]


def _comment(path: Path) -> list[str]:
    """The lines of comment that a file begins with."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return [line.removeprefix("#").strip() for line in lines]


def _shown_name(described: Mapping[str, Any]) -> str:
    """The name by which Prefect's commands know a deployment: flow/name."""
    flow = cast(str, described["entrypoint"]).rpartition(".")[2].partition("_")[0]
    return f"{flow}/{described['name']}"


def _prefect(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of Prefect's commands. environment: what the deployments' files name, and the folder."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "prefect", "--no-prompt", *arguments],
        cwd=environment["PWD"],
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def _must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise MillraceError(f"`prefect {' '.join(done.args[5:])}` failed:\n{done.stdout.strip()}")
