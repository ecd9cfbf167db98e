"""All engines of a run: started, watched, restarted within their budget, and brought to a weight version.

Owns clients and who may serve; the handles on the processes are given to it. An engine serves only after it has
confirmed the version it is meant to have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from connectors.sglang.client import EngineClient
from connectors.sglang.dispatcher import Dispatcher
from core.config import RunConfig
from core.errors import ActorLostError, EngineError

log = logging.getLogger(__name__)


class Handle(Protocol):
    """A remote EngineServer."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def state(self) -> dict[str, Any]: ...


class Fleet:
    """The engines of one run."""

    def __init__(self, config: RunConfig, handle: Callable[[int], Awaitable[Handle]]) -> None:
        self.config = config
        self.restarts = 0
        self._handle = handle
        self._handles: dict[int, Handle] = {}
        self._clients: dict[int, EngineClient] = {}
        self._confirmed: dict[int, int] = {}
        self._known = False

    async def ensure(self, model: str) -> None:
        """Have every engine's process running. Raises EngineError when the restart budget is spent."""
        await asyncio.gather(*(self._ensure_one(index, model) for index in range(self.config.engines.count)))

    async def _ensure_one(self, index: int, model: str) -> None:
        for _ in range(self.config.engines.restarts + 1):
            try:
                if index not in self._handles:
                    self._handles[index] = await self._handle(index)
                state = await self._handles[index].state()
                if not state["alive"]:
                    self._drop(index)
                    if state["starts"]:
                        self._count_restart(index)
                    state = await self._handles[index].call("start", model)
            except ActorLostError as error:
                log.warning("engine %d: %s", index, error)
                self._handles.pop(index, None)
                self._drop(index)
                self._count_restart(index)
                continue
            await self._connect(index, state["url"])
            return
        raise EngineError(f"engine {index} could not be kept running; see its log")

    def _count_restart(self, index: int) -> None:
        self.restarts += 1
        if self.restarts > self.config.engines.restarts:
            raise EngineError(
                f"engine {index} died and engines.restarts = {self.config.engines.restarts} is spent; see its log, raise "
                "the budget, and start the run again: what finished is kept"
            )
        log.warning("engine %d died: restart %d of %d", index, self.restarts, self.config.engines.restarts)

    async def _connect(self, index: int, url: str) -> None:
        client = self._clients.get(index)
        if client is None or client.url != url:
            self._drop(index)
            self._clients[index] = client = EngineClient(url, f"engine-{index}")
            version = await client.weight_version()
            if version is not None:
                self._confirmed[index] = version

    def _drop(self, index: int) -> None:
        self._clients.pop(index, None)
        self._confirmed.pop(index, None)

    def unconfirmed(self, version: int) -> list[int]:
        """Engines that have not confirmed a version."""
        return [index for index in range(self.config.engines.count) if self._confirmed.get(index) != version]

    async def publish(self, directory: str, version: int, only: list[int] | None = None) -> dict[str, float]:
        """Load a version into engines and have each confirm it; seconds by phase. Requests in flight are kept."""
        clients = {i: self._clients[i] for i in (only if only is not None else sorted(self._clients))}
        for index in clients:
            self._confirmed.pop(index, None)
        marks = [time.perf_counter()]

        async def phase(call: Callable[[EngineClient], Awaitable[Any]]) -> list[Any]:
            results = await asyncio.gather(*(call(client) for client in clients.values()))
            marks.append(time.perf_counter())
            return list(results)

        await phase(lambda client: client.pause("retract"))
        await phase(lambda client: client.update_weights_from_disk(directory, version))
        await phase(lambda client: client.resume())
        confirmed = await phase(lambda client: client.weight_version())
        for index, found in zip(clients, confirmed, strict=True):
            if found != version:
                raise EngineError(f"engine-{index} confirms weight version {found}, {version} was published")
            self._confirmed[index] = version
        names = ("pause", "load", "resume", "confirm")
        return {name: end - start for name, start, end in zip(names, marks[:-1], marks[1:], strict=True)}

    def dispatcher(self, version: int, recover: Callable[[int], Awaitable[None]]) -> Dispatcher:
        """A dispatcher over the engines that serve a version."""
        rollout = self.config.rollout

        def serving() -> list[EngineClient]:
            return [
                client for index, client in self._clients.items() if self._confirmed.get(index) == version
            ]

        return Dispatcher(
            serving,
            recover,
            version=version,
            attempts=rollout.attempts,
            progress_timeout_s=rollout.progress_timeout_s,
        )

    async def close(self) -> None:
        """Close connections; processes are left to their actors."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients.clear()
        self._confirmed.clear()
