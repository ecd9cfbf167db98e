"""The local MLflow server's process: MLflow's own application behind a login, without its assistant.

    python -m millrace.connectors.mlflow.app FD STORE HOME

FD is the number of an inherited socket that listens on loopback. STORE is the tracking store's URI. HOME is the server's
MILLRACE_HOME. MILLRACE_MLFLOW_LOGIN holds the login, `user:password` of HTTP basic authentication.

The assistant is off because it runs shell commands on the server's host for anyone who can open the page.
"""

import base64
import hmac
import os
import socket
import sys
from collections.abc import MutableMapping
from typing import Any

from millrace.connectors.host.local_server import Application, OwnAddressesOnly, Receive, Send
from millrace.connectors.mlflow.server import LOGIN

OPEN = "/health"
ASSISTANT = "/mlflow/assistant"


class MlflowLogin:
    """ASGI middleware: answers 401 to requests without the login, except to `/health`, and 404 to the assistant's."""

    def __init__(self, app: Application, login: str) -> None:
        self.app = app
        self.wanted = b"Basic " + base64.b64encode(login.encode())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and not self._may(scope):
            challenge = (b"www-authenticate", b'Basic realm="millrace"')
            await _answer(send, 401, "the login is in prefect-auth of MILLRACE_HOME", challenge)
        elif scope["type"] == "http" and ASSISTANT in scope["path"]:
            await _answer(send, 404, "millrace serves MLflow without its assistant")
        else:
            await self.app(scope, receive, send)

    def _may(self, scope: MutableMapping[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return bool(scope["path"] == OPEN or hmac.compare_digest(given, self.wanted))


async def _answer(send: Send, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
    sent = [(b"content-type", b"text/plain"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": text.encode()})


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
