"""A real HTTP server that rewards ask: scores, chat completions, and every way of failing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class RewardServer:
    """Answers by what is in the path, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.said = "It is right.\nScore: 7"
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One question."""
        self.asked.append(await request.json())
        self.headers.append(request.headers.get("Authorization"))
        kind = request.path.strip("/")
        if kind == "v1/chat/completions":
            return web.json_response({"choices": [{"message": {"role": "assistant", "content": self.said}}]})
        if kind == "busy" and len(self.asked) < 3:
            return web.Response(status=503, text="later")
        if kind == "hangs":
            await asyncio.sleep(30)
        if kind == "refuses":
            return web.Response(status=401, text="who are you?")
        if kind == "moved":
            return web.Response(status=307, headers={"Location": "/number"})
        if kind == "words":
            return web.Response(text="well done")
        if kind == "long":
            return web.Response(text="1" * (2 << 20))
        if kind == "mapping":
            return web.json_response({"score": 0.5, "exact": 1, "comment": "good"})
        return web.json_response(0.25)


@asynccontextmanager
async def reward_server() -> AsyncIterator[RewardServer]:
    """It listens on the loopback meanwhile."""
    server = RewardServer()
    application = web.Application()
    application.router.add_post("/{path:.*}", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
