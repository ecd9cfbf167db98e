"""A server's holder in a thread of this process, with the face of an actor's handle."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from millrace.connectors.sglang.process import EngineServer
from millrace.core.config import RunConfig

COUNT = 2


def fleet_config(model: Path, **changes: dict[str, Any]) -> RunConfig:
    """A configuration with two embedded engines; `changes` by section."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "engines-under-test", "iterations": 1},
        "model": {"path": str(model)},
        "data": {"sources": [{"path": "none.jsonl"}]},
        "engines": {"kind": "embedded", "count": COUNT, "threads": 1, "restarts": 8, "start_timeout_s": 120},
    }
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    return RunConfig.model_validate(values)


class LocalHandle:
    """An EngineServer or RouterServer in a thread of this process, with the face of an actor."""

    def __init__(self, config: RunConfig, index: int, cls: type = EngineServer) -> None:
        self.server = cls(config.model_dump(mode="json"), index, COUNT)
        self._thread = ThreadPoolExecutor(1)

    async def call(self, method: str, *args: Any) -> Any:
        function = getattr(self.server, method)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def state(self) -> dict[str, Any]:
        return self.server.state()

    def signal(self, number: int) -> None:
        os.kill(self.server.state()["pid"], number)

    def close(self) -> None:
        self._thread.submit(self.server.kill).result()
        self._thread.shutdown()
