"""The local Prefect server's process: Prefect's application, with retries of requests that SQLite refused.

    python -m millrace.connectors.prefect.app FD HOME

FD is the number of an inherited socket that listens on loopback. HOME is the server's MILLRACE_HOME, which identifies it among
all processes.

SQLite refuses a write if the transaction started to read before another writer wrote. Prefect's server then does nothing and
answers 503; its client waits two seconds, and the run with it. A few milliseconds later the request would succeed.
"""

import asyncio
import base64
import hmac
import os
import socket
import sys
from collections.abc import MutableMapping
from types import FrameType
from typing import Any

import uvicorn
from typing_extensions import override

from millrace.connectors.host.local_server import (
    Application,
    Message,
    OwnAddressesOnly,
    Receive,
    Send,
)

LARGEST = 64 << 20  # bytes of a body
STRANGERS = 64 << 10  # bytes of a body without the login; Prefect itself answers such a request
ATTEMPTS = 20
WAIT_S = 0.05
REFUSED = 503


class PrefectLogin:
    """ASGI middleware that bounds request bodies: to a small size without the login, and to `LARGEST` with it.

    Prefect's application checks the login only after it has read the whole body into memory. Its answer to a small request
    without the login is unchanged.
    """

    def __init__(self, app: Application, login: str) -> None:
        self.app = app
        self.wanted = b"Basic " + base64.b64encode(login.encode())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        known = hmac.compare_digest(headers.get(b"authorization", b""), self.wanted)
        left = LARGEST if known else STRANGERS
        answered = False

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise _TooLargeError
            return message

        async def forward(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        length = headers.get(b"content-length", b"0")
        try:
            if not length.isdigit() or int(length) > left:
                raise _TooLargeError
            await self.app(scope, bounded, forward)
        except _TooLargeError:
            if not answered:
                status = 413 if known else 401
                # the rest of the body is not read, so the connection cannot be used again
                sent = [(b"content-type", b"text/plain"), (b"connection", b"close")]
                await send({"type": "http.response.start", "status": status, "headers": sent})
                await send({"type": "http.response.body", "body": b"the body is too large"})


class _TooLargeError(Exception):
    """A request's body is larger than allowed."""


class RetryRefused:
    """ASGI middleware: answers 503 only after the application has done so `ATTEMPTS` times."""

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = await _body(receive)
        for attempt in range(1, ATTEMPTS + 1):
            if await self._attempt(dict(scope), body, receive, send, last=attempt == ATTEMPTS):
                return
            await asyncio.sleep(WAIT_S)

    async def _attempt(
        self, scope: MutableMapping[str, Any], body: bytes, receive: Receive, send: Send, *, last: bool
    ) -> bool:
        """Make the request once; False if it was refused, in which case no answer was sent."""
        replayed = refused = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()  # the client's disconnect message
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def forward(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == REFUSED and not last:
                refused = True
            if not refused:
                await send(message)

        try:
            await self.app(scope, replay, forward)
        except Exception:  # noqa: BLE001 - Starlette answers 503, then raises the error again for the server's log
            if not refused:
                raise
        return not refused


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class SignalledServer(uvicorn.Server):
    """Uvicorn's server, which sleeps until a signal ends it. Uvicorn's own looks ten times a second whether one came.

    It never renews the time in a Date header: config must leave that header out.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        assert not config.date_header
        super().__init__(config)
        self._signalled = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @override
    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        if not await self.on_tick(0):
            await self._signalled.wait()

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:  # otherwise `main_loop` sees it when it starts
            self._loop.call_soon_threadsafe(self._signalled.set)


def guarded(app: Application, login: str) -> Application:
    """Prefect's application with both middlewares."""
    return OwnAddressesOnly(PrefectLogin(RetryRefused(app), login))


def main() -> None:
    """Serve on the inherited socket until the process is ended."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    host, port = listener.getsockname()
    os.environ |= {"PREFECT_SERVER_API_HOST": host, "PREFECT_SERVER_API_PORT": str(port)}
    from prefect.logging.configuration import setup_logging
    from prefect.server.api.server import create_app

    from millrace.connectors.host.garbage import use_few_heaps
    from millrace.connectors.prefect.garbage import collect_between_requests
    from millrace.connectors.prefect.patches import (
        look_for_cancellations_less_often,
        look_for_work_less_often,
        send_heartbeats_less_often,
    )
    from millrace.connectors.prefect.retention import bound_page_caches, keep_newest
    from millrace.connectors.prefect.server import AUTH, kept_iterations

    setup_logging()
    use_few_heaps()
    bound_page_caches()
    look_for_work_less_often()
    look_for_cancellations_less_often()
    send_heartbeats_less_often()
    kept = kept_iterations()
    application = guarded(create_app(final=True), os.environ[AUTH])
    server = SignalledServer(uvicorn.Config(application, log_level="error", date_header=False))

    async def serve() -> None:
        works = (keep_newest(kept), collect_between_requests(lambda: server.started))
        beside = [asyncio.create_task(work) for work in works]
        await server.serve(sockets=[listener])
        for task in beside:
            task.cancel()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
