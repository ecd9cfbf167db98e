"""The server's garbage is collected while no connection is at work: a statement among it holds everything up otherwise."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from prefect.server.database.configurations import ENGINES
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from millrace.connectors.prefect import garbage
from millrace.connectors.prefect.garbage import collect_between_requests


class Ring:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


@pytest_asyncio.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/prefect.db")
    monkeypatch.setitem(ENGINES, (asyncio.get_running_loop(), "test", False, None), made)
    yield made
    await made.dispose()


@pytest_asyncio.fixture
async def collecting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(garbage, "EVERY_S", 0.01)
    task = asyncio.create_task(collect_between_requests(lambda: True))
    await asyncio.sleep(0)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gc.isenabled()


async def until_collected(ring: weakref.ref[Ring]) -> None:
    async with asyncio.timeout(60):
        while ring() is not None:  # noqa: ASYNC110 - the collector tells nobody
            await asyncio.sleep(0.01)


async def test_nothing_is_collected_while_a_connection_is_at_work(
    engine: AsyncEngine, collecting: None
) -> None:
    async with engine.connect() as connection:
        await connection.execute(text("select 1"))
        ring = weakref.ref(Ring())
        assert not gc.isenabled()
        await asyncio.sleep(0.3)
        assert ring() is not None
    await until_collected(ring)


async def test_garbage_is_collected_at_last_where_connections_are_always_at_work(
    engine: AsyncEngine, collecting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine.connect() as connection:
        await connection.execute(text("select 1"))
        ring = weakref.ref(Ring())
        await asyncio.sleep(0.1)
        monkeypatch.setattr(garbage, "LONGEST_S", 0.05)
        await until_collected(ring)


async def test_what_a_server_loads_at_its_start_is_left_out_of_collections(engine: AsyncEngine) -> None:
    started = False
    task = asyncio.create_task(collect_between_requests(lambda: started))
    await asyncio.sleep(0.1)
    loaded, frozen = [Ring() for _ in range(1000)], gc.get_freeze_count()
    assert not gc.isenabled()
    started = True
    async with asyncio.timeout(60):
        while gc.get_freeze_count() < frozen + len(loaded):  # noqa: ASYNC110 - the collector tells nobody
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gc.get_freeze_count() == 0
