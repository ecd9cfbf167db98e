"""Engines that answer late: a proxy in front of each holds requests and answers back for a time that its seed decides.

What is behind a proxy is a real engine, reached by HTTP. Owns how long what is held back; knows nothing of runs.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import aiohttp
import orjson
from aiohttp import web

USUAL_S, LONG_S = 0.02, 0.6  # at most, of most requests and of one in LONG_EVERY
LONG_EVERY = 6
BODY_LIMIT = 1 << 30
HOP_BY_HOP = {"host", "content-length", "transfer-encoding", "connection", "keep-alive"}


class SlowEngine:
    """A proxy in front of one engine. Requests to generate are late, and their answers; all else passes at once."""

    def __init__(self, engine: str, seed: str) -> None:
        """seed: decides with a request's id for how long it is held back."""
        self.engine = engine
        self.url = ""
        self.answered: list[str] = []  # ids of requests to generate, in the order of their answers
        self._seed = seed
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """It listens on the loopback meanwhile. Who leaves before the answer is not waited for, and the engine sees it."""
        application = web.Application(client_max_size=BODY_LIMIT)
        application.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with aiohttp.ClientSession(
                auto_decompress=False, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
            ) as self._session:
                yield
        finally:
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        generates = request.path == "/generate"
        rid = str(orjson.loads(body).get("rid")) if generates else ""
        late = random.Random(f"{self._seed} {rid}")
        if generates:
            await asyncio.sleep(_delay(late))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        assert self._session is not None, "it listens"
        target = f"{self.engine}{request.path_qs}"
        async with self._session.request(request.method, target, data=body, headers=headers) as answer:
            if generates:
                await asyncio.sleep(_delay(late))
            passed = {n: value for n, value in answer.headers.items() if n.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
        if generates:
            self.answered.append(rid)
        return response


def _delay(late: random.Random) -> float:
    return late.uniform(0, LONG_S if late.randrange(LONG_EVERY) == 0 else USUAL_S)


@contextmanager
def slow_engines(engines: Sequence[str], seed: str) -> Iterator[list[SlowEngine]]:
    """A proxy in front of each of these addresses, in a thread."""
    slow = [SlowEngine(engine, f"{seed} {number}") for number, engine in enumerate(engines)]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stack = AsyncExitStack()

    async def begin() -> None:
        for one in slow:
            await stack.enter_async_context(one.listening())

    try:
        try:
            asyncio.run_coroutine_threadsafe(begin(), loop).result()
            yield slow
        finally:
            asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def setting(slow: Sequence[SlowEngine]) -> str:
    """What the command line adds for a run that generates there."""
    addresses = ", ".join(f"'{one.url}'" for one in slow)
    return f"engines={{kind: external, addresses: [{addresses}]}}"
