"""Stops the pages of local servers from loading anything from outside in a browser.

Prefect's page calls its analytics even if they are off, and MLflow's fetches a video. With this header a browser refuses both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

HEADER = b"content-security-policy"
SOURCES = {
    "default-src": "'self'",
    # the graph of a flow run compiles its shaders with Function()
    "script-src": "'self' 'unsafe-eval'",
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "media-src": "'self' data: blob:",
    "worker-src": "'self' data: blob:",
    # older browsers do not count a websocket of the same server as 'self'
    "connect-src": "'self' data: blob: ws://127.0.0.1:* ws://localhost:*",
    "frame-src": "'self' data: blob:",
    "object-src": "'none'",
    "base-uri": "'self'",
    "form-action": "'self'",
}
POLICY = "; ".join(f"{name} {sources}" for name, sources in SOURCES.items())


class OwnAddressesOnly:
    """ASGI middleware that adds the policy to every answer: a web worker's script obeys its own answer's policy, not its page's."""

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, POLICY.encode())]}
            await send(message)

        await self.app(scope, receive, forward)
