"""`millrace deploy`: create the Prefect deployments that ship with millrace, to run from a folder of the user's.

Owns no definition: deployments/prefect.yaml holds them. Prefect's own commands do the work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

from millrace.connectors.prefect.server import ensure_server, export_line
from millrace.core.errors import MillraceError

POOL = "local"  # the work pool that prefect.yaml names


def create_deployments(folder: Path) -> list[str]:
    """Create the work pool, unless it exists, and the deployments; returns the lines that start a worker.

    Flow runs import from `folder` and resolve relative paths against it.
    """
    api = ensure_server()
    if _prefect(folder, "work-pool", "inspect", POOL).returncode:
        _must(_prefect(folder, "work-pool", "create", POOL, "--type", "process"))
    file = str(resources.files("millrace.deployments") / "prefect.yaml")
    _must(_prefect(folder, "deploy", "--all", "--prefect-file", file))
    return [
        f"train/train (a form), train/file (a YAML file) and sft/sft run from {folder} once a worker runs:",
        export_line(api),
        f"prefect worker start --pool {POOL}",
    ]


def _prefect(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "prefect", "--no-prompt", *arguments],
        cwd=folder,
        env={**os.environ, "PWD": str(folder)},  # prefect.yaml's working directory
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def _must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise MillraceError(f"`prefect {' '.join(done.args[5:])}` failed:\n{done.stdout.strip()}")
