"""The engines of a run as one fleet: found again, made, put to sleep.

Owns how an engine's handle is found. Knows nothing of the trainer: before an engine's process starts, `make_room` is awaited.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from millrace.connectors.engines.external import ExternalEngine
from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.engines.process import EngineNode, EngineServer, RouterServer
from millrace.connectors.engines.spanning import SpanningEngine
from millrace.connectors.ray import actors, placement
from millrace.connectors.ray.actors import Actor, HeldPart
from millrace.core.config import RunConfig
from millrace.core.contracts.handles import EngineHandle, RouterHandle
from millrace.core.errors import ActorLostError
from millrace.core.waits import CANCEL_S
from millrace.tasks.runtime.cluster import Cluster, check_network
from millrace.tasks.runtime.proxies import EngineNodeProxy, EngineProxy, RouterProxy

T = TypeVar("T", bound=HeldPart)
WATCH_S = 2.0  # seconds between two looks at the processes of engines over several nodes


class Engines:
    """The engines of one run. They are a cache of storage: lost ones are started again within their budget."""

    def __init__(self, config: RunConfig, cluster: Cluster, make_room: Callable[[], Awaitable[None]]) -> None:
        self.config = config
        self._cluster = cluster
        self._make_room = make_room
        self._fleet: Fleet | None = None
        self._spanning: dict[int, SpanningEngine] = {}  # engines over several nodes
        self._watching: asyncio.Task[None] | None = None

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
        if self._watching:
            self._watching.cancel()
            await asyncio.wait([self._watching], timeout=CANCEL_S)
            self._watching = None
        if self._fleet:
            await self._fleet.close()

    def _new_fleet(self) -> Fleet:
        return Fleet(self.config, self._engine, self._router, self._make_room, owner=self._cluster.identity)

    async def _living(self) -> Mapping[int, EngineHandle]:
        """Handles on the engines whose actors live, by index. What is left of an engine that lost one of its nodes is ended."""
        await self._cluster.join()
        living: dict[int, EngineHandle] = {}
        for index in range(self.config.engines.count):
            actor = await self._cluster.find_alive("engine", index, EngineServer)
            numbers = await self._further_nodes(index)
            further = [await self._cluster.find_alive("engine_node", at, EngineNode) for at in numbers]
            held = [node for node in further if node is not None]
            if actor is not None and len(held) == len(further):
                living[index] = self._handle(index, actor, held)
                continue
            with contextlib.suppress(ActorLostError):
                for node in held:
                    await node.call(EngineNode.kill)
                if actor is not None:
                    await actor.call(EngineServer.kill)
        await self._end_incomplete()
        return living

    async def _engine(self, index: int) -> EngineHandle:
        """A handle on an engine: living actors, new ones, or an external engine's address."""
        if not self.config.engines.started:
            return ExternalEngine(self.config, index)
        await self._cluster.join()
        actor = await self._actor("engine", index, EngineServer)
        further = [
            await self._actor("engine_node", at, EngineNode) for at in await self._further_nodes(index)
        ]
        return self._handle(index, actor, further)

    async def _actor(self, role: str, index: int, cls: Callable[[Any, int, int], T]) -> Actor[T]:
        """The living actor, or a new one in its place."""
        actor = await self._cluster.find_alive(role, index, cls)
        if actor is not None:
            check_network(self.config, [(await actor.state())["address"]], served=True)
            return actor
        places = await self._cluster.places(role)
        check_network(self.config, [places[index].address], served=True)
        settings, limit = self._cluster.settings, self.config.part_limit
        return actors.make(role, index, len(places), cls, settings, places[index], limit=limit)

    async def _further_nodes(self, index: int) -> range:
        """Numbers of the actors on an engine's further nodes. engines.kind=auto has none on a cluster without GPUs."""
        e = self.config.engines
        each = len(await self._cluster.places("engine_node")) // e.count if e.nodes > 1 else 0
        return range(index * each, (index + 1) * each)

    def _handle(
        self, index: int, actor: Actor[EngineServer], further: list[Actor[EngineNode]]
    ) -> EngineHandle:
        first = EngineProxy(actor)
        if not further:
            return first
        engine = self._spanning[index] = SpanningEngine(index, first, list(map(EngineNodeProxy, further)))
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return engine

    async def _watch(self) -> None:
        """End what is left of engines that lost one of their nodes, so that their requests fail and they are started again."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self._end_incomplete()

    async def _end_incomplete(self) -> None:
        await asyncio.gather(*(engine.end_if_incomplete() for engine in self._spanning.values()))

    async def _router(self) -> RouterHandle:
        """A handle on the router: a living actor, or a new one."""
        await self._cluster.join()
        limit = self.config.part_limit
        actor = actors.find("router", 0, RouterServer, limit=limit)
        if actor is None:
            settings, here = self._cluster.settings, placement.here()
            actor = actors.make("router", 0, 1, RouterServer, settings, here, limit=limit)
        return RouterProxy(actor)
