"""The server of `millrace view`: the page's files and the answers as JSON, on loopback, for readers with the login.

Owns addresses, the login, and what a browser may do with an answer. It reads; nothing that it serves changes a file. What a model
wrote leaves as JSON alone: no address answers with it as a page.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.connectors.host.local_server import (
    Application,
    Login,
    Message,
    Receive,
    Send,
    answer_text,
    listening,
)
from millrace.core.errors import ConfigError, MillraceError, MissingFileError, StorageError
from millrace.flows.viewer.answers import Viewer, as_json

PAGE = Path(__file__).with_name("page")
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
SCRIPTS = ("dom.js", "charts.js", "talk.js", "run.js", "iteration.js", "sample.js", "tables.js", "main.js")
STYLE, INDEX, ICON = "viewer.css", "index.html", "icon.svg"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
USUAL_PORT = 4300


def application(viewer: Viewer, login: str) -> Application:
    """The server's application. login: `user:password`."""

    def page(request: Request) -> Response:
        return _file(INDEX)

    def nothing(request: Request) -> Response:
        return Response("no such address", 404, media_type="text/plain")

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        return _file(name) if name in (*SCRIPTS, STYLE, ICON) else nothing(request)

    def about(request: Request) -> Response:
        return _json({"run": viewer.first, "follow": viewer.follow})

    def runs(request: Request) -> Response:
        return _told(viewer.runs)

    def compare(request: Request) -> Response:
        asked = request.query_params
        names = [name for name in asked.get("runs", "").split(",") if name]
        return _told(lambda: viewer.compare(names, asked.get("name", "reward/mean")))

    def answer(request: Request) -> Response:
        path = request.path_params
        return _told(lambda: viewer.ask(path["run"], path["what"], request.query_params))

    routes = [
        Route("/-/page/{name}", file),
        Route("/-/api", about),
        Route("/-/api/runs", runs),
        Route("/-/api/compare", compare),
        Route("/-/api/{run}/{what}", answer),
        Route("/-/{path:path}", nothing),
        Route("/{path:path}", page),
    ]
    return _Guard(GZipMiddleware(Starlette(routes=routes), minimum_size=1000), login)


class _Guard:
    """ASGI middleware: answers requests that have the login and name this host, and adds the headers to every answer."""

    def __init__(self, app: Application, login: str) -> None:
        self._app = app
        self._login = Login(login)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif refusal := self._refusal(dict(scope["headers"])):
            await answer_text(forward, *refusal)
        else:
            await self._app(scope, receive, forward)

    def _refusal(self, headers: Mapping[bytes, bytes]) -> tuple[Any, ...] | None:
        """Status, text and headers of the answer to a request that is refused."""
        host = headers.get(b"host", b"").rpartition(b":")[0] or headers.get(b"host", b"")
        if host not in (b"127.0.0.1", b"localhost"):
            return 403, "this page is served to this machine alone"
        if not self._login.came_with(headers):
            return 401, Login.MISSING, Login.CHALLENGE
        # another page may make the browser ask, with the login that it keeps
        if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site") and (
            headers.get(b"sec-fetch-mode") != b"navigate"
        ):
            return 403, "another page asked"
        return None


def _file(name: str) -> Response:
    path = PAGE / name
    return Response(path.read_bytes(), media_type=KINDS[path.suffix])


def _json(value: Any, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


def _told(call: Any) -> Response:
    """The answer of a call, or its error as JSON: 404 for what is not there, 500 for a broken file, 400 for a wrong question."""
    try:
        return _json(call())
    except MillraceError as error:
        status = (
            404 if isinstance(error, MissingFileError) else 500 if isinstance(error, StorageError) else 400
        )
        return _json({"error": {"what": error.reason, "where": error.where, "remedy": error.remedy}}, status)


def opened(port: int | None) -> socket.socket:
    """A socket on loopback: on this port, or else on the usual or a free one. Raises ConfigError if it is taken."""
    listener = listening(*([port] if port else [USUAL_PORT, 0]))
    if listener is None:
        raise ConfigError(
            "another program has taken it", where=f"--port {port}", remedy="give another, or none"
        )
    return listener


def serve(viewer: Viewer, login: str, listener: socket.socket) -> None:
    """Serve until the process is interrupted."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = uvicorn.Config(application(viewer, login), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
