"""Holders of servers in threads of this process, as the handles that stand for actors elsewhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from millrace.connectors.engines.process import EngineServer, RouterServer
from millrace.core.config import RunConfig
from millrace.core.contracts.handles import ServerState

COUNT = 2


def fleet_config(model: Path, **changes: dict[str, Any]) -> RunConfig:
    """A configuration with two engines, embedded ones unless `changes`, by section, name another kind."""
    kind = changes.get("engines", {}).get("kind", "embedded")
    started: dict[str, Any] = {} if kind == "external" else {"count": COUNT}
    threads = {"threads": 1} if kind == "embedded" else {}
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "engines-under-test", "iterations": 1},
        "model": {"path": str(model)},
        "data": {"sources": [{"path": "none.jsonl"}]},
        "engines": {"kind": kind, "restarts": 8, "start_timeout_s": 120, **started, **threads},
    }
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    return RunConfig.model_validate(values)


class LocalHandle:
    """An EngineServer in a thread of this process, as an EngineHandle."""

    def __init__(self, config: RunConfig, index: int) -> None:
        self.server = EngineServer(config.model_dump(mode="json"), index, COUNT)
        self._thread = ThreadPoolExecutor(1)

    async def _run(self, method: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, method, *args)

    async def state(self) -> ServerState:
        return self.server.state()

    async def start(self, model: str) -> ServerState:
        state: ServerState = await self._run(self.server.start, model)
        return state

    async def kill(self) -> None:
        await self._run(self.server.kill)

    async def note_released(self, tags: list[str]) -> None:
        await self._run(self.server.note_released, tags)

    async def download(self, url: str) -> str:
        return str(await self._run(self.server.download, url))

    async def remove_download(self) -> None:
        await self._run(self.server.remove_download)

    async def trace_folder(self) -> str:
        return str(await self._run(self.server.trace_folder))

    async def store_trace(self, url: str) -> list[str]:
        return list(await self._run(self.server.store_trace, url))

    def signal(self, number: int) -> None:
        os.kill(self.server.state()["pid"], number)

    def close(self) -> None:
        self._thread.submit(self.server.kill).result()
        self._thread.shutdown()


class LocalRouterHandle:
    """A RouterServer in a thread of this process, as a RouterHandle."""

    def __init__(self, config: RunConfig) -> None:
        self.server = RouterServer(config.model_dump(mode="json"), 0, 1)
        self._thread = ThreadPoolExecutor(1)

    async def state(self) -> ServerState:
        return self.server.state()

    async def start(self) -> ServerState:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.server.start)

    async def kill(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.server.kill)

    def signal(self, number: int) -> None:
        os.kill(self.server.state()["pid"] or 0, number)

    def close(self) -> None:
        self._thread.submit(self.server.kill).result()
        self._thread.shutdown()
