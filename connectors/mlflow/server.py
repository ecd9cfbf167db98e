"""A local MLflow server for a tracking store in a file or a database: on loopback, behind a login, started once.

Owns its process. Knows nothing of what a run logs.
"""

import os
from pathlib import Path

from millrace.connectors.host.local_server import LocalServer

USUAL_PORT = 5000
LOGIN = "MILLRACE_MLFLOW_LOGIN"  # the process's environment variable for the login, `user:password`
SQLITE = "sqlite:///"


def ensure_mlflow(uri: str, login: str, port: int | None = None, timeout_s: float = 120) -> str:
    """Start the local server for the store at `uri`, unless it runs; returns its address.

    login: `user:password`. port: on loopback; None for the usual port, or a free one if that is taken.
    A home has one such server: if it serves another store, or has another port than asked for, it is replaced.
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
    """The address of the local server; if none runs, the address it gets if its usual port is free."""
    record = _server("").record()
    return record["url"] if record else f"http://127.0.0.1:{USUAL_PORT}"


def _absolute(uri: str) -> str:
    """A store's URI with an absolute path, so that it means the same in any folder."""
    if not uri.startswith(SQLITE):
        return uri
    return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).absolute()}"


def _server(login: str) -> LocalServer:
    return LocalServer(
        title="MLflow server",
        file="mlflow-server",
        module="millrace.connectors.mlflow.app",
        path="",
        folder=Path(os.sep),  # a folder that is never removed: the server needs none
        environment=lambda page: {
            LOGIN: login,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
        },
        port_taken="give another --port, or none",
    )
