"""Finds the engine with the fewest requests without looking at all engines for every request.

Owns a heap of each engine's last known load. Knows nothing of which engines serve: a change needs a new object.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from millrace.connectors.engines.client import EngineClient

Engines = list[EngineClient]
Entry = tuple[int, str]  # requests in flight at the time of the entry, then the engine's id


class LeastLoad:
    """Chooses by load, then by id. Notices requests of other senders after at most as many choices as there are engines."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = engines
        self.by_id = {engine.engine_id: engine for engine in engines}
        self._heap: list[Entry] = []
        self._left = 0  # choices until all loads are read again

    def choose(self) -> EngineClient:
        """The engine for the next request, which counts as sent."""
        if not self._left:
            self._heap = [(engine.in_flight, engine.engine_id) for engine in self.engines]
            heapq.heapify(self._heap)
            self._left = len(self.engines)
        self._left -= 1
        while True:
            load, name = self._heap[0]
            engine = self.by_id[name]
            if load == engine.in_flight:
                heapq.heapreplace(self._heap, (load + 1, name))
                return engine
            heapq.heapreplace(self._heap, (engine.in_flight, name))

    def ended(self, engine: EngineClient) -> None:
        """Record that a request of an engine has ended. Ignores an engine that was replaced by another with its name."""
        if self.by_id.get(engine.engine_id) is engine and len(self._heap) < 4 * len(self.engines):
            heapq.heappush(self._heap, (engine.in_flight, engine.engine_id))


def until_changed(changes: Callable[[], int], find: Callable[[], Engines]) -> Callable[[], Engines]:
    """A cached `find`: calls it again only after `changes` has increased, and otherwise returns the same list."""
    kept: tuple[int, Engines] = (-1, [])

    def found() -> Engines:
        nonlocal kept
        if kept[0] != changes():
            kept = changes(), find()
        return kept[1]

    return found
