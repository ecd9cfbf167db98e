"""An engine that somebody else runs, known by its address, with the face of an actor's handle.

Owns waiting for it to answer. It is never started, ended or given options here; whoever runs it starts it again.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from millrace.connectors.sglang.client import EngineClient
from millrace.core.config import RunConfig
from millrace.core.errors import EngineError

POLL_S = 0.5


class ExternalEngine:
    """One engine of engines.addresses."""

    def __init__(self, config: RunConfig, index: int) -> None:
        self.config = config
        self.index = index
        assert config.engines.kind == "external"
        self.url = config.engines.addresses[index].rstrip("/")
        self._waited = 0  # times it was waited for, as an own engine is started
        self._given_up = False
        self._released: list[str] = []

    async def state(self) -> dict[str, Any]:
        """Whether it answers, as an own engine's actor tells it."""
        alive = not self._given_up and await self._answers()
        return {
            "index": self.index,
            "alive": alive,
            "url": self.url if alive else None,
            "pid": None,
            "starts": self._waited,
            "log": f"(kept where {self.url} runs)",
            "released": list(self._released),
        }

    async def call(self, method: str, *args: Any) -> Any:
        """What a fleet asks of an actor: `start` waits for it, `kill` gives it up until it is waited for."""
        if method == "start":
            return await self._wait()
        if method == "kill":
            self._given_up = True
        elif method == "note_released":
            self._released = list(args[0])
        else:
            raise EngineError(
                f"engine {self.index} at {self.url}: cannot {method} what is run by somebody else"
            )
        return None

    async def _wait(self) -> dict[str, Any]:
        """Its state once it answers. Raises EngineError after engines.start_timeout_s."""
        self._waited += 1
        self._given_up, self._released = False, []
        deadline = time.monotonic() + self.config.engines.start_timeout_s
        while not await self._answers():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine {self.index} at {self.url} (engines.addresses) does not answer in engines.start_timeout_s = "
                    f"{self.config.engines.start_timeout_s:g}; start it there, and start the run again: what finished is kept"
                )
            await asyncio.sleep(POLL_S)
        return await self.state()

    async def _answers(self) -> bool:
        client = EngineClient(self.url, f"engine-{self.index}")
        try:
            return await client.health()
        finally:
            await client.close()
