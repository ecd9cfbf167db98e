"""Stores unfinished answers segment by segment, so that little of a long answer is generated again after a kill.

Owns when a segment is due, and that no engine runs far ahead of storage. Knows nothing of requests or files.

    engine   tokens ->  |----|----|----|--        an event every `interval` tokens
    storage  segments   |====|====|               written meanwhile, one after the other
                                  \\___ unstored: an engine that is too far ahead of storage is halted, and goes on
                                       once storage has what there is
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from millrace.connectors.engines.client import Generation
from millrace.connectors.engines.dispatching.pieces import joined, segment

PARTS = 4  # events per rollout.flush_tokens; the engine is halted at the third unstored one, since halting takes a moment


class SegmentStore(Protocol):
    """Stores the segments of one answer, in their order."""

    def put(self, segment: Generation) -> Callable[[], bool]:
        """Start to store a segment. Returns a function that tells whether it is stored."""
        ...

    async def settled(self) -> None:
        """Wait until all segments are stored."""
        ...


class Flush:
    """Stores one answer while it is generated. Each segment starts at the end of the previous one."""

    def __init__(self, tokens: int, store: SegmentStore) -> None:
        """tokens: at most this many are generated again after a kill (rollout.flush_tokens)."""
        self.interval = max(1, tokens // PARTS)
        self._most = tokens - 2 * self.interval
        self._store = store
        self._put = self._stored = 0  # tokens
        self._pending: list[
            tuple[int, Callable[[], bool]]
        ] = []  # number of tokens at the end of a segment, and whether it is stored

    def take(self, made: Generation, least: int = 1) -> bool:
        """Store the unstored tokens of the answer, if there are at least `least`; returns whether the engine may continue.

        made: the answer so far, with each token's version.
        """
        length = len(made.output_ids)
        if length - self._put >= max(1, least):
            self._pending.append((length, self._store.put(segment(made, self._put))))
            self._put = length
        while self._pending and self._pending[0][1]():
            self._stored = self._pending.pop(0)[0]
        return length - self._stored <= self._most

    async def settled(self) -> None:
        """Wait until all segments are stored."""
        await self._store.settled()


class Parts:
    """Receives the parts of one request's answer."""

    def __init__(self, before: Generation, flush: Flush, allowed: range) -> None:
        """before: the part of the answer from earlier requests. allowed: weight versions."""
        self.made, self.halted = before, False
        self._before, self._flush, self._allowed = before, flush, allowed

    def take(self, part: Generation) -> bool:
        """Store what is due of an answer so far; returns whether the engine may continue."""
        if any(version not in self._allowed for _, version in part.weight_versions):
            return True  # not stored, since the whole answer will be refused
        self.made = joined(self._before, part)
        self.halted = not self._flush.take(self.made, self._flush.interval)
        return not self.halted
