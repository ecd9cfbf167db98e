"""Commands around the servers whose pages show runs: server, ui, deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.flows.commands.terminal import RootOption, console, guarded, print_lines


def server(
    action: Annotated[str, typer.Argument(help="start or stop")] = "start",
    force: Annotated[
        bool,
        typer.Option("--force", help="With stop: also while runs are driven, which start them again."),
    ] = False,
) -> None:
    """Start (or find) the local Prefect server; or stop it, MLflow's, and the local Ray head with every actor on it."""
    from millrace.connectors.prefect.server import ensure_server, login_hint, ui_url

    if action == "stop":
        guarded(lambda: _stop(force=force))
    elif action == "start":
        url = guarded(ensure_server)
        console.print(f"Prefect: {ui_url(url)}{login_hint()}", soft_wrap=True)
    else:
        raise typer.BadParameter("start or stop")


def _stop(*, force: bool) -> None:
    from millrace.connectors.host.own_folders import remove_dead_folders
    from millrace.connectors.mlflow.server import stop_mlflow
    from millrace.connectors.prefect.server import stop_server
    from millrace.connectors.ray.cluster import stop_local_head
    from millrace.connectors.storage.driven_runs import check_none_driven

    if not force:
        check_none_driven()
    console.print(f"Prefect server: {'stopped' if stop_server() else 'none runs'}")
    console.print(f"MLflow server: {'stopped' if stop_mlflow() else 'none runs'}")
    console.print(f"Ray head: {'stopped' if stop_local_head() else 'none runs'}")
    remove_dead_folders()


def ui(
    run: Annotated[str | None, typer.Argument(help="Run whose curves MLflow's page shows.")] = None,
    root: RootOption = "runs",
    uri: Annotated[
        str | None, typer.Option(help="MLflow tracking URI; the run's, or the default store, when not given.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of MLflow's page; 5000 or a free one when not given.")
    ] = None,
) -> None:
    """Start (or find) the Prefect and MLflow servers, and print the addresses of their pages."""
    from millrace.flows.tools.ui import open_pages

    print_lines(guarded(lambda: open_pages(root, run, uri, port)))


def deploy(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="YAML files of runs that get a deployment each."),
    ] = None,
    recipes: Annotated[bool, typer.Option("--recipes", help="Deploy millrace's recipes too.")] = False,
    pool: Annotated[
        str, typer.Option(help="Work pool of the deployments; created unless it exists.")
    ] = "local",
    kind: Annotated[
        str, typer.Option("--type", help="How the pool runs a flow run: process, docker or kubernetes.")
    ] = "process",
    image: Annotated[
        str | None, typer.Option(help="Image that has millrace, for docker and kubernetes.")
    ] = None,
) -> None:
    """Create Prefect deployments of the files, and of the flows for any run; a worker runs them from this folder."""
    from millrace.flows.tools import deploy as tool

    print_lines(
        guarded(
            lambda: tool.deploy(Path.cwd(), files or (), recipes=recipes, pool=pool, kind=kind, image=image)
        )
    )
