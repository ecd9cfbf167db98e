"""An idle server sleeps: what waits in it is woken, or looks seldom. Counts wake-ups, which other work on the host leaves alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from burner_redis import PubSub
from docket import Docket, Worker
from prefect.server.api import server as prefect_server

from millrace.connectors.host.local_server import listening
from millrace.connectors.prefect import app, patches
from tests.soak.victims import processes
from tests.support.flow_runs import Workplace

WAKES = 7.0  # of the main thread in a second; a timer that fires ten times a second is more alone
LOOK_S = 10.0
LOOKS = 18  # the first ones may see what the start left to do


@pytest.mark.slow
def test_the_loop_of_an_idle_server_wakes_a_few_times_a_second(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    place.call("server", "start")
    try:
        main, *others = (psutil.Process(pid) for pid in processes("prefect", 0, tmp_path / "home"))
        assert not others
        wakes: list[float] = []
        while len(wakes) < LOOKS and min(wakes, default=WAKES) >= WAKES:
            before, since = main.num_ctx_switches().voluntary, time.monotonic()
            time.sleep(LOOK_S)
            wakes.append((main.num_ctx_switches().voluntary - before) / (time.monotonic() - since))
        assert min(wakes) < WAKES, wakes
        main.terminate()
        main.wait(60)  # raises if it still runs
    finally:
        place.call("server", "stop")


async def answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


@contextmanager
def caught(number: signal.Signals) -> Iterator[list[int]]:
    """Signals that reached this process: uvicorn raises those that ended it again."""
    seen: list[int] = []
    former = signal.signal(number, lambda got, _: seen.append(got))
    yield seen
    signal.signal(number, former)


@asynccontextmanager
async def serving() -> AsyncIterator[asyncio.Task[None]]:
    listener = listening(0)
    assert listener is not None
    server = app.SignalledServer(
        uvicorn.Config(answers, lifespan="off", log_level="error", date_header=False)
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(60):
        while not server.started:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
    yield task
    assert task.done()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_server_that_sleeps(number: signal.Signals) -> None:
    with caught(number) as seen:
        async with serving() as task:
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), number)
            async with asyncio.timeout(60):
                await task
    assert seen == [number]


async def test_a_signal_that_comes_before_the_sleep_ends_a_server() -> None:
    server = app.SignalledServer(
        uvicorn.Config(answers, lifespan="off", log_level="error", date_header=False)
    )
    server.handle_exit(signal.SIGTERM, None)
    async with asyncio.timeout(60):
        await server.main_loop()


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PubSub, "get_message", PubSub.get_message)  # and back afterwards
    patches.look_for_cancellations_less_often()


@pytest.mark.usefixtures("patched")
async def test_a_cancelled_task_of_the_servers_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "LOOK", timedelta(seconds=0.05))
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with asyncio.timeout(60), Docket(name="a", url="memory://") as docket, Worker(docket) as worker:
        docket.register(endless)
        running = asyncio.create_task(worker.run_forever())
        await docket.add(endless, key="b")()
        await started.wait()
        await docket.cancel("b")
        await ended.wait()
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.usefixtures("patched")
async def test_a_wait_for_cancellations_takes_no_thread_and_ends_with_its_worker() -> None:
    async with asyncio.timeout(60), Docket(name="a", url="memory://") as docket, Worker(docket) as worker:
        started = asyncio.Event()

        async def first() -> None:
            started.set()

        docket.register(first)
        running = asyncio.create_task(worker.run_forever())
        await docket.add(first, key="b")()
        await started.wait()  # the worker listens before it takes a task
        assert getattr(asyncio.get_running_loop(), "_default_executor") is None  # noqa: B009 - threads start with it
        running.cancel()
        await asyncio.wait([running])


async def test_the_worker_of_the_servers_services_sends_a_heartbeat_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefect_server, "Docket", prefect_server.Docket)  # and back afterwards
    patches.send_heartbeats_less_often()
    async with prefect_server.Docket(name="a", url="memory://") as docket:
        assert docket.heartbeat_interval == patches.HEARTBEAT == timedelta(seconds=60)
