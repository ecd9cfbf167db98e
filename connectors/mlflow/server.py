"""A local MLflow server over a tracking store that is a file or a database: on loopback, behind a login, started once.

Owns its process. Knows nothing of what a run logs.
"""

from __future__ import annotations

import os
from pathlib import Path

from millrace.connectors.storage.exclusive.local_server import LocalServer

USUAL_PORT = 5000
LOGIN = "MILLRACE_MLFLOW_LOGIN"  # in the process's environment: what it asks for, `user:password`
SQLITE = "sqlite:///"


def ensure_mlflow(uri: str, login: str, port: int | None = None, timeout_s: float = 120) -> str:
    """The address of the local server over the store at `uri`, which is started if it does not run.

    login: `user:password`, what it asks for. port: on loopback; None for the usual one, or another if that is taken.
    A home has one such server: one over another store, or on another port than wanted, is ended.
    Raises MillraceError with the end of the server's log if it does not come up.
    """
    store = _absolute(uri)
    server = _server(login)
    with server.locked():
        record = server.record()
        if record and record.get("serves") == store and (port is None or record["url"].endswith(f":{port}")):
            url = server.running(timeout_s)
            if url:
                return url
        server.end()
        return server.start(timeout_s, *([port] if port else [USUAL_PORT, 0]), serves=store)


def stop_mlflow() -> bool:
    """Stop the local server; False if none runs."""
    return _server("").stop()


def local_page() -> str:
    """The address of the local server, or where it will be if none has another program's port."""
    record = _server("").record()
    return record["url"] if record else f"http://127.0.0.1:{USUAL_PORT}"


def _absolute(uri: str) -> str:
    """The URI of a store as seen from any folder."""
    if not uri.startswith(SQLITE):
        return uri
    return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).absolute()}"


def _server(login: str) -> LocalServer:
    return LocalServer(
        title="MLflow server",
        file="mlflow-server",
        module="millrace.connectors.mlflow.app",
        path="",
        folder=Path(os.sep),  # it needs none, and keeps none in use
        environment=lambda page: {
            LOGIN: login,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
        },
        port_taken="give another --port, or none",
    )
