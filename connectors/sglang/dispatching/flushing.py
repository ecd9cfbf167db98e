"""Answers under way are stored segment by segment, so that little of a long one is generated again after a kill.

Owns when a segment is due, and that no engine runs far ahead of what is stored. Knows nothing of requests or files.

    engine   tokens ->  |----|----|----|--        an event every `interval` tokens
    storage  segments   |====|====|               written meanwhile, one after the other
                                  \\___ unstored: an engine that is too far ahead of storage is halted, and goes on
                                       once storage has what there is
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from millrace.connectors.sglang.client import Generation
from millrace.connectors.sglang.dispatching.pieces import joined, segment

PARTS = 4  # events in rollout.flush_tokens: at the third that is unstored the engine is halted, which takes a moment


class SegmentStore(Protocol):
    """Where segments of one answer are stored, in their order."""

    def put(self, segment: Generation) -> Callable[[], bool]:
        """Have a segment stored. What is returned says whether it is by now."""
        ...

    async def settled(self) -> None:
        """Wait until what was put is stored."""
        ...


class Flush:
    """Stores one answer while it is generated. Segments meet: each begins where the one before it ended."""

    def __init__(self, tokens: int, store: SegmentStore) -> None:
        """tokens: at most that are generated again after a kill (rollout.flush_tokens)."""
        self.interval = max(1, tokens // PARTS)
        self._most = tokens - 2 * self.interval
        self._store = store
        self._put = self._stored = 0  # tokens
        self._pending: list[
            tuple[int, Callable[[], bool]]
        ] = []  # tokens up to the end of a segment, whether it is stored

    def take(self, made: Generation, least: int = 1) -> bool:
        """Store what of the answer is not, if it is at least so many tokens; whether the engine may go on.

        made: of the answer since it was asked for, with the version of every token.
        """
        length = len(made.output_ids)
        if length - self._put >= max(1, least):
            self._pending.append((length, self._store.put(segment(made, self._put))))
            self._put = length
        while self._pending and self._pending[0][1]():
            self._stored = self._pending.pop(0)[0]
        return length - self._stored <= self._most

    async def settled(self) -> None:
        """Wait until what was taken is stored."""
        await self._store.settled()


class Parts:
    """Takes the parts of one request."""

    def __init__(self, before: Generation, flush: Flush, allowed: range) -> None:
        """before: what of the answer earlier requests made. allowed: weight versions."""
        self.made, self.halted = before, False
        self._before, self._flush, self._allowed = before, flush, allowed

    @property
    def wanted(self) -> dict[str, Any]:
        """What a client is given, to report the parts."""
        return {"on_part": self._take, "every": self._flush.interval}

    def _take(self, part: Generation) -> bool:
        if any(version not in self._allowed for _, version in part.weight_versions):
            return True  # whose answer is refused
        self.made = joined(self._before, part)
        self.halted = not self._flush.take(self.made, self._flush.interval)
        return not self.halted
