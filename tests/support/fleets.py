"""A fleet over two real engines, and requests to it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from millrace.connectors.engines.client import Generation
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.fleet import Fleet

PROMPT = [10, 20, 30]
SHORT = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
LONG = {"max_new_tokens": 600, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
MakeFleet = Callable[..., Fleet]


def recovery(fleet: Fleet, model: Path) -> Callable[[int], Awaitable[None]]:
    """What a run does when a request was lost: rebuild, then bring what is unconfirmed to the version."""
    lock = asyncio.Lock()

    async def recover(version: int) -> None:
        async with lock:
            await fleet.ensure(str(model))
            missing = fleet.unconfirmed(version)
            if missing:
                await fleet.update_weights(str(model), version, missing)

    return recover


async def serving(fleet: Fleet, model: Path, version: int) -> Dispatcher:
    """A dispatcher whose engines have all confirmed a version."""
    recover = recovery(fleet, model)
    await recover(version)
    return fleet.dispatcher(version, recover)


async def generate(
    dispatcher: Dispatcher, count: int, params: dict[str, Any], session: str | None = None
) -> list[Generation]:
    """`count` samples at once."""
    return await asyncio.gather(
        *(dispatcher.generate(PROMPT, params, rid=uuid.uuid4().hex, session=session) for _ in range(count))
    )


async def until_generating(dispatcher: Dispatcher) -> None:
    """Wait until both engines generate for somebody."""
    for _ in range(400):
        engines = dispatcher._engines()
        if all([(await engine.server_info())["load"]["running"] for engine in engines]):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engines do not generate")


async def assert_idle(dispatcher: Dispatcher) -> None:
    """Hold that no engine runs a request, a second from now at the latest."""
    for engine in dispatcher._engines():
        for _ in range(100):
            if not (await engine.server_info())["load"]["running"]:
                break
            await asyncio.sleep(0.01)
        assert (await engine.server_info())["load"]["running"] == 0


async def checksums(fleet: Fleet) -> list[Any]:
    """Of each engine the checksums of the tensors that it holds."""
    return [await engine.weights.checksum() for engine in fleet._clients.values()]
