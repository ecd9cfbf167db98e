"""How many samples may be in flight, by how full the engines' KV caches are. A pure state machine.

A request that finds no room in the cache waits in the engine, or has another request retracted, whose tokens are then computed
again. A request that grows takes more room later, so caches are kept below full:

- The first limit is the number of longest samples that the caches hold. It cannot be too high.
- The limit grows by GROWTH if it holds samples back, and every cache stayed below ROOM while as many samples ended as may be in
  flight: such a time shows what the last growth did. Samples that started together are short together and long together.
- Above FULL it falls to what fills the fullest cache to ROOM; an engine that retracted requests counts as full. It also falls by
  the requests that wait in engines, when there have been more than QUEUE of the running ones for PATIENCE readings. No sample is
  ended, so that a limit that fell does not fall again before as few samples are in flight.

ROOM * GROWTH stays below FULL, so that growth alone never makes the limit fall.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

ROOM, FULL = 0.7, 0.88
GROWTH = 1.2
QUEUE, PATIENCE = 0.5, 6


@dataclass(frozen=True)
class EngineLoad:
    """One engine, or the fullest part of it."""

    used: float  # share of the KV cache that requests hold
    capacity: int  # tokens of the KV cache
    running: int  # requests
    waiting: int  # requests that the engine has accepted and not started
    retracted: int = 0  # requests whose keys and values were dropped lately


@dataclass(frozen=True)
class Admission:
    """The limit, and what was seen in the time since as many samples ended as may be in flight, or since it changed."""

    bound: int  # the limit is never higher
    longest: int  # tokens that a sample may have, prompt included
    part: float = 1.0  # share of the engines' caches that this process may fill: others send requests too
    limit: int = 1  # one sample makes the engines ready, whose size is not known before
    known: bool = False  # whether the size of the engines' caches is
    ended: int = 0  # samples that ended in this time
    fullest: float = 0.0  # of all caches in this time
    queued: int = 0  # readings in a row with a long queue

    def after(self, loads: Sequence[EngineLoad], in_flight: int, ended: int, waiting: bool) -> "Admission":
        """The state after a reading of all engines.

        in_flight: samples that are admitted. ended: samples that ended since the last reading. waiting: whether the limit holds
        any sample back.
        """
        if not loads:
            return self
        if not self.known:
            fit = self.part * sum(load.capacity for load in loads) / self.longest
            return replace(self, limit=self._bounded(math.floor(fit)), known=True)
        long = any(load.waiting > QUEUE * load.running for load in loads)
        fullest = max(1.0 if load.retracted else load.used for load in loads)
        now = replace(
            self,
            ended=self.ended + ended,
            fullest=max(self.fullest, fullest),
            queued=self.queued + 1 if long else 0,
        )
        if in_flight <= self.limit and fullest > FULL:
            return now._to(math.floor(in_flight * ROOM / fullest))
        if in_flight <= self.limit and now.queued >= PATIENCE:
            return now._to(in_flight - math.ceil(self.part * sum(load.waiting for load in loads)))
        if now.ended < self.limit:
            return now
        grows = waiting and now.fullest < ROOM and not long
        return now._to(math.ceil(self.limit * GROWTH) if grows else self.limit)

    def _to(self, limit: int) -> "Admission":
        """The state at the start of a new time."""
        return replace(self, limit=self._bounded(limit), ended=0, fullest=0.0, queued=0)

    def _bounded(self, limit: int) -> int:
        return max(1, min(limit, self.bound))
