"""A web application that listens on the loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler


@asynccontextmanager
async def listening(answer: Handler, path: str = "/{path:.*}") -> AsyncIterator[str]:
    """It answers what is posted to the path meanwhile. Gives its address."""
    application = web.Application()
    application.router.add_post(path, answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
