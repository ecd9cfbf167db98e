"""A fleet whose engines are Ray actors: an engine's actor lost in the middle, a second driver."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.engines.process import EngineServer
from millrace.connectors.host.process_identity import wait_ended
from millrace.connectors.ray import actors
from millrace.core.config import RunConfig
from millrace.tasks.runtime.proxies import EngineProxy

PARAMS = {"max_new_tokens": 1000, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}


@pytest.mark.slow
async def test_engines_as_actors_survive_the_loss_of_one_and_of_their_driver(
    joined: str, tiny_model: Path
) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"name": "engine-actors", "iterations": 1},
            "model": {"path": str(tiny_model)},
            "data": {"sources": [{"path": "none.jsonl"}]},
            "engines": {"kind": "embedded", "count": 2, "threads": 1, "start_timeout_s": 60},
        }
    )
    settings = config.model_dump(mode="json")

    def actor(index: int) -> actors.Actor[EngineServer]:
        found = actors.find("engine", index, EngineServer)
        return found or actors.make("engine", index, 2, EngineServer, settings)

    async def handle(index: int) -> EngineProxy:
        return EngineProxy(actor(index))

    fleet = Fleet(config, handle)
    lock = asyncio.Lock()

    async def recover(version: int) -> None:
        async with lock:
            await fleet.ensure(str(tiny_model))
            missing = fleet.unconfirmed(version)
            if missing:
                await fleet.update_weights(str(tiny_model), version, missing)

    await recover(1)
    dispatcher = fleet.dispatcher(1, recover)
    running = [
        asyncio.create_task(dispatcher.generate([10, 20], PARAMS, rid=f"r{n}", session=None))
        for n in range(4)
    ]
    await asyncio.sleep(0.3)
    state = await actor(1).state()
    server = psutil.Process(state["pid"])
    os.kill(state["actor_pid"], signal.SIGKILL)
    found = await asyncio.gather(*running)
    assert len({tuple(g.output_ids) for g in found}) == 1
    assert {g.weight_versions[0] for g in found} == {(0, 1)}
    assert not wait_ended([server], 10)  # the server died with its actor
    await recover(1)
    assert fleet.unconfirmed(1) == []
    assert fleet.restarts == 1
    await fleet.close()

    second = Fleet(config, handle)
    await second.ensure(str(tiny_model))
    assert second.unconfirmed(1) == []
    assert second.restarts == 0
    await second.close()
    pids = [(await (await handle(index)).state())["pid"] for index in range(2)]
    assert await actors.end() == 2
    assert not wait_ended([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 10)
