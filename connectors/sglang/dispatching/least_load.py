"""Which of many engines has the fewest requests, without a look at each for every request.

Owns a heap of what was known of each engine's load. Knows nothing of which engines serve: another is made when that changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from millrace.connectors.sglang.client import EngineClient

Engines = list[EngineClient]
Entry = tuple[int, str]  # requests in flight when it was noted, then the id


class LeastLoad:
    """Chooses by load, among equals by id. Requests that others send are seen after as many choices as there are engines."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = engines
        self.by_id = {engine.engine_id: engine for engine in engines}
        self._heap: list[Entry] = []
        self._left = 0  # choices until all loads are looked at again

    def choose(self) -> EngineClient:
        """The engine that the next request goes to; it counts as sent."""
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
        """Note that a request of an engine is over. One that another of its name has replaced is none to choose."""
        if self.by_id.get(engine.engine_id) is engine and len(self._heap) < 4 * len(self.engines):
            heapq.heappush(self._heap, (engine.in_flight, engine.engine_id))


def until_changed(changes: Callable[[], int], find: Callable[[], Engines]) -> Callable[[], Engines]:
    """Finds engines again only where `changes` counts more than it did: the same list else."""
    kept: tuple[int, Engines] = (-1, [])

    def found() -> Engines:
        nonlocal kept
        if kept[0] != changes():
            kept = changes(), find()
        return kept[1]

    return found
