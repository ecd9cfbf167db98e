"""Commands around the Prefect server: server, deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.flows.cli.terminal import console, guarded


def server(action: Annotated[str, typer.Argument(help="start or stop")] = "start") -> None:
    """Start (or find) the local Prefect server; or stop it, and the local Ray head with every actor on it."""
    from millrace.connectors.prefect.server import ensure_server, login_hint, ui_url

    if action == "stop":
        guarded(_stop)
    elif action == "start":
        url = guarded(ensure_server)
        console.print(f"Prefect: {ui_url(url)}{login_hint()}", soft_wrap=True)
    else:
        raise typer.BadParameter("start or stop")


def _stop() -> None:
    from millrace.connectors.prefect.server import stop_server
    from millrace.connectors.ray.cluster import stop_local_head
    from millrace.connectors.storage.own_folders import remove_dead_folders

    console.print(f"Prefect server: {'stopped' if stop_server() else 'none runs'}")
    console.print(f"Ray head: {'stopped' if stop_local_head() else 'none runs'}")
    remove_dead_folders()


def deploy() -> None:
    """Create the Prefect deployments train and sft; a worker runs them from this folder."""
    from millrace.flows.tools.deploy import create_deployments

    console.print(guarded(lambda: create_deployments(Path.cwd())), soft_wrap=True)
