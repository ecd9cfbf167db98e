"""The local MLflow server's process: MLflow's own application behind a login, without its assistant.

    python -m millrace.connectors.mlflow.app FD STORE HOME

FD is the number of an inherited socket that listens on loopback. STORE is the tracking store's URI. HOME is the server's
MILLRACE_HOME. MILLRACE_MLFLOW_LOGIN holds the login, `user:password` of HTTP basic authentication.

The assistant is off because it runs shell commands on the server's host for anyone who can open the page.
"""

import os
import socket
import sys
from collections.abc import MutableMapping
from typing import Any

from millrace.connectors.host.local_server import (
    Application,
    Login,
    OwnAddressesOnly,
    Receive,
    Send,
    answer_text,
)
from millrace.connectors.mlflow.server import LOGIN

OPEN = "/health"
ASSISTANT = "/mlflow/assistant"


class MlflowLogin:
    """ASGI middleware: answers 401 to requests without the login, except to `/health`, and 404 to the assistant's."""

    def __init__(self, app: Application, login: str) -> None:
        self.app = app
        self.login = Login(login)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and not self._may(scope):
            await answer_text(send, 401, Login.MISSING, Login.CHALLENGE)
        elif scope["type"] == "http" and ASSISTANT in scope["path"]:
            await answer_text(send, 404, "millrace serves MLflow without its assistant")
        else:
            await self.app(scope, receive, send)

    def _may(self, scope: MutableMapping[str, Any]) -> bool:
        return bool(scope["path"] == OPEN or self.login.came_with(dict(scope["headers"])))


def main() -> None:
    """Serve on the inherited socket until the process is ended."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    store, home = sys.argv[2:]
    login = os.environ.pop(LOGIN)
    artifacts = f"{home}/mlflow-artifacts"
    from mlflow.environment_variables import _MLFLOW_SGI_NAME, MLFLOW_SERVER_ENABLE_JOB_EXECUTION
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    os.environ |= {
        BACKEND_STORE_URI_ENV_VAR: store,
        ARTIFACT_ROOT_ENV_VAR: artifacts,
        _MLFLOW_SGI_NAME.name: "uvicorn",
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION.name: "false",
    }
    import uvicorn
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    from millrace.connectors.mlflow.tracker import made_once

    with made_once(store):
        initialize_backend_stores(store, store, artifacts)
    config = uvicorn.Config(OwnAddressesOnly(MlflowLogin(app, login)), log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
