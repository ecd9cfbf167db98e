"""A real HTTP server that rewards ask: scores, chat completions, and every way of failing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from tests.support.loopback import listening

FAILING = 0.05  # share of the samples for which `now-and-then` fails
WORK_S = 0.02  # that `now-and-then` takes


class RewardServer:
    """Answers by what is in the path, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.said = "It is right.\nScore: 7"
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One question."""
        question = await request.json()
        self.asked.append(question)
        self.headers.append(request.headers.get("Authorization"))
        kind = request.path.strip("/")
        if kind == "v1/chat/completions":
            return web.json_response({"choices": [{"message": {"role": "assistant", "content": self.said}}]})
        if kind == "now-and-then":
            await asyncio.sleep(WORK_S)
            if fails(question):
                return web.Response(status=503, text="never this one")
            return web.json_response(float(str(question["label"]) in question["response"]))
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
        if kind.startswith("charset-"):
            return web.Response(
                body=b"0.25", headers={"Content-Type": f"text/plain; charset={kind.removeprefix('charset-')}"}
            )
        if kind == "long":
            return web.Response(text="1" * (2 << 20))
        if kind == "mapping":
            return web.json_response({"score": 0.5, "exact": 1, "comment": "good"})
        return web.json_response(0.25)


def fails(question: Mapping[str, Any]) -> bool:
    """Whether `now-and-then` fails for a sample: this follows from its prompt and response, however often it is asked."""
    content = json.dumps([question["prompt"], question["response"]])
    return hashlib.sha256(content.encode()).digest()[0] < FAILING * 256


@asynccontextmanager
async def reward_server() -> AsyncIterator[RewardServer]:
    """It listens on the loopback meanwhile."""
    server = RewardServer()
    async with listening(server.answer) as server.url:
        yield server


@contextmanager
def serve_rewards() -> Iterator[RewardServer]:
    """The same beside code that is not asynchronous, in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    serving = reward_server()
    try:
        server = asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result()
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
