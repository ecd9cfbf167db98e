"""Gates in front of real engines: what SGLang demands of an engine that only prefills or decodes is kept there, and requests are noted."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import aiohttp
from aiohttp import web

BOOTSTRAP_PORT = 8998
MEETING = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


class Room:
    """Where the halves of a request meet: one decodes when the other has prefilled, which goes when the first has room."""

    def __init__(self) -> None:
        self.prefilled, self.admitted = asyncio.Event(), asyncio.Event()


class Seen(NamedTuple):
    """A request to generate."""

    part: str
    body: dict[str, Any]
    headers: dict[str, str]


class Rooms:
    """All of them, and what was asked of whom."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._rooms: dict[tuple[Any, ...], Room] = {}
        self.gates: list[Gate] = []
        self.prefills: Counter[str] = Counter()
        self.decodes: Counter[str] = Counter()
        self.lost = 0  # how many requests' caches do not arrive

    def of(self, body: dict[str, Any]) -> Room:
        key = tuple(body.pop(name) for name in MEETING)
        assert key[:2] == ("127.0.0.1", BOOTSTRAP_PORT)
        return self._rooms.setdefault(key, Room())


class Gate:
    """An engine that does its part of every request only; null: all of it."""

    def __init__(self, engine: str, part: Literal["prefill", "decode", "null"], rooms: Rooms) -> None:
        self.engine, self.part, self.rooms = engine, part, rooms
        self.url = ""
        self.slots = asyncio.Semaphore(64)  # requests that it decodes at a time
        rooms.gates.append(self)

    async def generate(self, body: dict[str, Any]) -> web.Response:
        room = self.rooms.of(body)
        if self.part == "prefill":
            self.rooms.prefills[self.url] += 1
            body["sampling_params"]["max_new_tokens"] = 1
            answer = await self.forward("POST", "/generate", body)
            if self.rooms.lost:
                self.rooms.lost -= 1
            else:
                await room.admitted.wait()
                room.prefilled.set()
            return answer
        self.rooms.decodes[self.url] += 1
        async with self.slots:
            room.admitted.set()
            await room.prefilled.wait()
            return await self.forward("POST", "/generate", body)

    async def forward(self, verb: str, path: str, body: Any) -> web.Response:
        async with aiohttp.ClientSession() as http, http.request(verb, self.engine + path, json=body) as got:
            if path != "/server_info":
                return web.Response(body=await got.read(), status=got.status, content_type=got.content_type)
            info = await got.json()
        info["disaggregation_mode"] = self.part
        info["disaggregation_bootstrap_port"] = BOOTSTRAP_PORT if self.part == "prefill" else None
        return web.json_response(info)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        if request.path == "/generate":
            self.rooms.seen.append(Seen(self.part, dict(body), dict(request.headers)))
            return await (
                self.forward("POST", "/generate", body) if self.part == "null" else self.generate(body)
            )
        return await self.forward(request.method, request.path, body)


async def open_gates(
    stack: contextlib.AsyncExitStack, engines: Sequence[str], parts: Sequence[Any], rooms: Rooms
) -> list[str]:
    """A gate in front of each engine, for as long as the stack is open; their URLs."""
    urls = []
    for engine, part in zip(engines, parts, strict=True):
        gate = Gate(engine, part, rooms)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{any:.*}", gate.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        gate.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        urls.append(gate.url)
    return urls
