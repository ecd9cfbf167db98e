"""`millrace server`: start the local Prefect server, or stop it and the other local servers."""

from typing import Annotated

import typer

from millrace.flows.commands.terminal import console, guarded


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
