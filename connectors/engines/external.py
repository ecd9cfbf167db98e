"""An EngineHandle for an external engine, known only by its address.

Owns waiting for it to answer. Never starts, ends or configures it; the person who runs it restarts it.
"""

import asyncio
import time

from millrace.connectors.engines.kinds import connect_to
from millrace.core.config import RunConfig
from millrace.core.config.engines import ExternalEngines
from millrace.core.contracts.handles import ServerState
from millrace.core.contracts.references import resolved
from millrace.core.errors import EngineError

POLL_S = 0.5


class ExternalEngine:
    """One engine of engines.addresses."""

    def __init__(self, config: RunConfig, index: int) -> None:
        self.config = config
        self.index = index
        assert isinstance(config.engines, ExternalEngines)
        self._connect = connect_to(config.engines)
        self.url = config.engines.addresses[index].rstrip("/")
        self._key = resolved(config.engines.key, "engines.key")
        self._waits = 0  # times it was waited for, reported as starts
        self._given_up = False
        self._released: list[str] = []

    async def state(self) -> ServerState:
        """Whether it answers."""
        alive = not self._given_up and await self._answers()
        return {
            "index": self.index,
            "alive": alive,
            "url": self.url if alive else None,
            "key": self._key if alive else None,
            "pid": None,
            "starts": self._waits,
            "log": f"(kept where {self.url} runs)",
            "released": list(self._released),
        }

    async def kill(self) -> None:
        """Count it as dead until `start` waits for it again."""
        self._given_up = True

    async def note_released(self, tags: list[str]) -> None:
        """Record which GPU memory it has released."""
        self._released = list(tags)

    async def download(self, url: str) -> str:
        """Raises EngineError: files cannot be copied to an external engine's host."""
        raise EngineError(
            f"engine {self.index} at {self.url}: {url} cannot be copied to the host of an external engine; set sync.directory to a "
            "folder that both sides see"
        )

    async def remove_download(self) -> None:
        """Nothing was downloaded."""

    async def trace_folder(self) -> str:
        """Raises EngineError: its files are out of reach."""
        raise EngineError(
            f"engine {self.index} at {self.url}: files on the host of an external engine are out of reach"
        )

    async def store_trace(self, url: str) -> list[str]:
        """There are none."""
        return []

    async def start(self, model: str) -> ServerState:
        """Wait until it answers, and return its state. It must serve `model`. Raises EngineError after engines.start_timeout_s."""
        self._waits += 1
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
        client = self._connect(self.url, f"engine-{self.index}", None)
        try:
            return await client.health()
        finally:
            await client.close()
