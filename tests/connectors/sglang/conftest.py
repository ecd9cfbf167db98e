"""Two embedded engines behind real EngineServers, each held by a thread of its own as by an actor."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.engines.sglang.client import SglangClient
from tests.support.local_handle import COUNT, LocalHandle, LocalRouterHandle, fleet_config
from tests.support.session_engines import EnginePlace


@pytest.fixture(scope="session")
def handles(tiny_model: Path) -> Iterator[list[LocalHandle]]:
    made = [LocalHandle(fleet_config(tiny_model), index) for index in range(COUNT)]
    yield made
    for handle in made:
        if handle.server.state()["alive"]:
            handle.signal(signal.SIGCONT)
        handle.close()


@pytest.fixture(scope="session")
def routers() -> Iterator[dict[str, LocalRouterHandle]]:
    """Router processes by their configuration."""
    made: dict[str, LocalRouterHandle] = {}
    yield made
    for handle in made.values():
        handle.close()


@pytest_asyncio.fixture
async def make_fleet(
    handles: list[LocalHandle], routers: dict[str, LocalRouterHandle], tiny_model: Path
) -> AsyncIterator[Callable[..., Fleet]]:
    """make_fleet(make_room, section={...}): a fleet over the two engines, behind a router where engines.router is given."""
    made: list[Fleet] = []
    for held in handles:  # those that another test left dead would count as restarts
        if held.server.starts:
            await held.start(str(tiny_model))

    async def handle(index: int) -> LocalHandle:
        return handles[index]

    def make(make_room: Callable[[], Awaitable[None]] | None = None, **changes: dict[str, Any]) -> Fleet:
        config = fleet_config(tiny_model, **changes)
        key = str(config.engines.router)

        async def router() -> LocalHandle:
            if key not in routers:
                routers[key] = LocalRouterHandle(config)
            return routers[key]

        made.append(Fleet(config, handle, router, make_room))
        return made[-1]

    yield make
    for fleet in made:
        await fleet.close()
    for held in handles:
        state = held.server.state()
        if state["url"]:
            client = SglangClient(state["url"], "cleaner", state["key"])
            await client.resume()
            await client.abort()
            await client.close()


@pytest.fixture
async def client(engine: str) -> AsyncIterator[SglangClient]:
    """A client of the file's own `engine`."""
    made = SglangClient(engine, "engine-0")
    yield made
    await made.close()


@pytest.fixture
async def places() -> AsyncIterator[Callable[..., EnginePlace]]:
    made: list[EnginePlace] = []

    def make(*args: Any, **options: Any) -> EnginePlace:
        made.append(EnginePlace(*args, **options))
        return made[-1]

    yield make
    for place in made:
        place.pool.close()
