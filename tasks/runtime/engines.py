"""The engines of a run as one fleet: found again, made, put to sleep.

Owns how an engine's handle is found. Knows nothing of the trainer: before an engine's process starts, `make_room` is awaited.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from millrace.connectors.engines.external import ExternalEngine
from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.engines.process import EngineServer, RouterServer
from millrace.connectors.ray import actors, placement
from millrace.core.config import RunConfig
from millrace.core.contracts.handles import EngineHandle, RouterHandle
from millrace.tasks.runtime.cluster import Cluster, check_network
from millrace.tasks.runtime.proxies import EngineProxy, RouterProxy


class Engines:
    """The engines of one run. They are a cache of storage: lost ones are started again within their budget."""

    def __init__(self, config: RunConfig, cluster: Cluster, make_room: Callable[[], Awaitable[None]]) -> None:
        self.config = config
        self._cluster = cluster
        self._make_room = make_room
        self._fleet: Fleet | None = None

    @property
    def is_known(self) -> bool:
        """Whether this driver has a fleet already."""
        return self._fleet is not None

    async def exist(self) -> bool:
        """Whether an engine outlived an earlier driver, or runs outside the run."""
        return not self.config.engines.started or bool(await self._living())

    async def running(self) -> Fleet:
        """The fleet, with every engine running."""
        if self._fleet is None:
            self._fleet = self._new_fleet()
        await self._fleet.ensure(self._cluster.settings["model"]["path"])
        return self._fleet

    async def sleep(self) -> None:
        """Make engines release their GPU memory, also engines that an earlier driver left awake. Starts no engine."""
        if self._fleet is None:
            living = await self._living()
            if not living:
                return
            self._fleet = self._new_fleet()
            await self._fleet.attach(living)
        await self._fleet.sleep()

    async def close(self) -> None:
        """Close connections; the actors keep the processes."""
        if self._fleet:
            await self._fleet.close()

    def _new_fleet(self) -> Fleet:
        return Fleet(self.config, self._engine, self._router, self._make_room)

    async def _living(self) -> Mapping[int, EngineHandle]:
        """Handles on the engines whose actors live, by index."""
        await self._cluster.join()
        count = self.config.engines.count
        living = [await self._cluster.find_alive("engine", index, EngineServer) for index in range(count)]
        return {index: EngineProxy(actor) for index, actor in enumerate(living) if actor is not None}

    async def _engine(self, index: int) -> EngineHandle:
        """A handle on an engine: a living actor, a new actor, or an external engine's address."""
        if not self.config.engines.started:
            return ExternalEngine(self.config, index)
        await self._cluster.join()
        actor = await self._cluster.find_alive("engine", index, EngineServer)
        if actor is not None:
            check_network(self.config, [(await actor.state())["address"]], served=True)
            return EngineProxy(actor)
        place = (await self._cluster.places("engine"))[index]
        check_network(self.config, [place.address], served=True)
        settings, count = self._cluster.settings, self.config.engines.count
        limit = self.config.part_limit
        return EngineProxy(actors.make("engine", index, count, EngineServer, settings, place, limit=limit))

    async def _router(self) -> RouterHandle:
        """A handle on the router: a living actor, or a new one."""
        await self._cluster.join()
        limit = self.config.part_limit
        actor = actors.find("router", 0, RouterServer, limit=limit)
        if actor is None:
            settings, here = self._cluster.settings, placement.here()
            actor = actors.make("router", 0, 1, RouterServer, settings, here, limit=limit)
        return RouterProxy(actor)
