"""Places for samples in flight: as many as rollout.max_concurrency allows, or as the engines' KV caches have room for.

Owns the readings of the engines, and who waits; core/admission.py decides how many places there are.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import weakref
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.core.admission import Admission
from millrace.core.config import RunConfig
from millrace.core.errors import EngineLostError
from millrace.core.sharding import WHOLE, Share

log = logging.getLogger(__name__)
EVERY_S = 0.5


@dataclass(frozen=True)
class CachePressure:
    """used: largest share of an engine's KV cache that requests held. queue: most requests that waited in an engine."""

    used: float
    queue: int


class Places(Protocol):
    """Places for samples in flight."""

    @property
    def found(self) -> int | None:
        """How many there are, if the engines' caches decide that."""
        ...

    def take_pressure(self) -> CachePressure | None:
        """What the engines' caches reached since the last call; None if they were not read."""
        ...

    def place(self, priority: int | None) -> AbstractAsyncContextManager[object]:
        """A context with a place. The smallest number that waits comes first."""
        ...

    async def watch(self, engines: Dispatcher) -> None:
        """Called when engines are ready, before the first request to them."""
        ...


class FixedPlaces:
    """As many places as the configuration says, in the order of asking."""

    def __init__(self, count: int) -> None:
        self._places = asyncio.Semaphore(count)

    @property
    def found(self) -> int | None:
        """None: the configuration decides."""
        return None

    def take_pressure(self) -> CachePressure | None:
        """None: no cache is read."""
        return None

    def place(self, priority: int | None) -> AbstractAsyncContextManager[object]:
        """A context with a place."""
        return self._places

    async def watch(self, engines: Dispatcher) -> None:
        """Does nothing."""


class KvPlaces:
    """Places by the pressure on the engines' KV caches, which all samples of this process share."""

    def __init__(self, bound: int, longest: int, part: float = 1.0, every_s: float = EVERY_S) -> None:
        """bound, longest, part: see Admission."""
        self.state = Admission(bound, longest, part)
        self.in_flight = 0
        self._every_s = every_s
        self._pressure: CachePressure | None = None  # since it was taken
        self._ended = 0  # since the last reading
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap by priority, then by order
        # of generators in use: one for each version, or range of versions, that samples are made with now
        self._engines = weakref.WeakSet[Dispatcher]()
        self._watching: asyncio.Task[None] | None = None

    @property
    def found(self) -> int | None:
        """The limit now."""
        return self.state.limit

    def take_pressure(self) -> CachePressure | None:
        """What the engines' caches reached since the last call; None without a reading."""
        found, self._pressure = self._pressure, None
        return found

    @contextlib.asynccontextmanager
    async def place(self, priority: int | None) -> AsyncIterator[None]:
        """A context with a place."""
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority or 0, next(self._order), given))
        self._admit()
        try:
            await given
            self._watch_on()
            yield
        finally:
            if given.done() and not given.cancelled():
                self.in_flight -= 1
                self._ended += 1
                self._admit()

    async def watch(self, engines: Dispatcher) -> None:
        """Read these engines now, and from time to time while samples are in flight and others use them."""
        self._engines.add(engines)
        await self._read()
        self._watch_on()

    def _watch_on(self) -> None:
        """Go on reading, if that ended because no sample was in flight."""
        if not self._engines:
            return
        loop = asyncio.get_running_loop()  # a shard has one for each of its tasks
        if self._watching is None or self._watching.done() or self._watching.get_loop() is not loop:
            self._watching = loop.create_task(self._watch())

    def _admit(self) -> None:
        while self._waiting and self.in_flight < self.state.limit:
            _, _, given = heapq.heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                self.in_flight += 1

    async def _watch(self) -> None:
        while self.in_flight:
            await asyncio.sleep(self._every_s)
            await self._read()

    async def _read(self) -> None:
        engines = dict.fromkeys(engine for each in self._engines for engine in each.caching)
        readings = await asyncio.gather(*(engine.load() for engine in engines), return_exceptions=True)
        for reading in readings:
            # a lost engine is noticed by its requests
            if isinstance(reading, BaseException) and not isinstance(reading, EngineLostError):
                raise reading
        loads = [reading for reading in readings if not isinstance(reading, BaseException)]
        seen = [CachePressure(load.used, load.waiting) for load in loads]
        seen += [self._pressure] if self._pressure else []
        if seen:
            self._pressure = CachePressure(max(each.used for each in seen), max(each.queue for each in seen))
        ended, self._ended = self._ended, 0
        before = self.state.limit
        self.state = self.state.after(loads, self.in_flight, ended, bool(self._waiting))
        if self.state.limit != before:
            used = max(load.used for load in loads)
            text = "samples in flight: %d at most, before %d; the fullest KV cache is %.0f%% full"
            log.info(text, self.state.limit, before, 100 * used)
        self._admit()


def places_of(config: RunConfig, share: Share = WHOLE) -> Places:
    """The places of a process that makes this share of an iteration."""
    bound = share.part_of(config.rollout.max_concurrency * (config.engines.count - config.engines.prefill))
    if config.rollout.admission == "fixed":
        return FixedPlaces(bound)
    longest = config.data.max_prompt_tokens + config.rollout.longest_response
    return KvPlaces(bound, longest, len(share.places) / share.of)
