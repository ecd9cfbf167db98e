"""The local Prefect server's process: Prefect's own application, with a request that SQLite refused made again at once.

    python -m millrace.connectors.prefect.app FD

FD is the number of a socket that listens on loopback, inherited from whoever starts the process.

SQLite refuses a writer whose transaction began reading before another one wrote. Prefect's server answers 503 then, with
nothing done, and its client waits for two seconds, in which a run stands still. A few milliseconds later it succeeds.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

TRIES = 20
WAIT_S = 0.05
REFUSED = 503


class TryAgain:
    """An ASGI application around another: answers 503 only after the other one has done so `TRIES` times."""

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = await _body(receive)
        for attempt in range(1, TRIES + 1):
            if await self._once(dict(scope), body, receive, send, last=attempt == TRIES):
                return
            await asyncio.sleep(WAIT_S)

    async def _once(
        self, scope: MutableMapping[str, Any], body: bytes, receive: Receive, send: Send, *, last: bool
    ) -> bool:
        """Make the request; False if it was refused and nothing of the answer has been sent."""
        given = refused = False

        async def replayed() -> Message:
            nonlocal given
            if given:
                return await receive()  # word that the client is gone
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def passed_on(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == REFUSED and not last:
                refused = True
            if not refused:
                await send(message)

        try:
            await self.app(scope, replayed, passed_on)
        except Exception:  # noqa: BLE001 - Starlette raises what it has answered with 503, for the server's log
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


def main() -> None:
    """Serve on the inherited socket until ended."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    host, port = listener.getsockname()
    os.environ |= {"PREFECT_SERVER_API_HOST": host, "PREFECT_SERVER_API_PORT": str(port)}
    import uvicorn
    from prefect.logging.configuration import setup_logging
    from prefect.server.api.server import create_app

    setup_logging()
    config = uvicorn.Config(TryAgain(create_app(final=True)), log_level="error")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
