"""`millrace ui`: the pages that show runs, Prefect's and MLflow's, and the shell line for Prefect's own commands.

Owns which page of MLflow to open. Servers that the user configured are shown, not started.
"""

from typing import Annotated, Any

import typer

from millrace.connectors.mlflow.server import ensure_mlflow
from millrace.connectors.mlflow.tracker import default_uri, find_page, is_server
from millrace.connectors.prefect.server import ensure_server, export_line, login_file, login_hint, ui_url
from millrace.core.errors import ConfigError
from millrace.flows.commands.terminal import RootOption, guarded, print_lines
from millrace.flows.driver.stored_run import run_record, settings_of


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
    print_lines(guarded(lambda: open_pages(root, run, uri, port)))


def open_pages(root: str, run: str | None, uri: str | None, port: int | None) -> list[str]:
    """Start or find the servers; returns lines with the addresses of the pages.

    run: whose curves MLflow's page shows; without it, the list of runs with the newest one. uri: the tracking store, if the
    run's configuration names none.
    """
    record = run_record(root, run) if run else None
    store = (settings_of(record)["tracking"]["uri"] if record else None) or uri or default_uri()
    if record and record["mlflow_run_id"] is None:
        raise ConfigError(
            "has no curves yet",
            where=f"run {run}",
            remedy="start it, or leave its name out to see the others",
        )
    if port and is_server(store):
        raise ConfigError(
            "the runs are on your tracking server",
            where=f"--port {port}",
            remedy=f"leave it out, and open {store}",
        )
    api = ensure_server()
    if not is_server(store):
        ensure_mlflow(store, login_file().read_text(), port)
    login = (
        ""
        if is_server(store)
        else f" (user millrace; its password is what follows the colon in {login_file()})"
    )
    page = find_page(store, record["mlflow_run_id"] if record else None)
    return [
        f"Prefect  {_prefect_page(api, record)}{login_hint()}",
        f"MLflow   {page}{login}",
        export_line(api),
    ]


def _prefect_page(api: str, record: dict[str, Any] | None) -> str:
    """The page of the run's newest flow run; the page of all runs without one."""
    flow_run = record["attempts"][-1]["flow_run_id"] if record and record["attempts"] else None
    if flow_run is None:
        return ui_url(api)
    # imported here: the server's address is in the environment by now
    from prefect.utilities.urls import url_for

    return url_for("flow-run", obj_id=flow_run) or ui_url(api)
