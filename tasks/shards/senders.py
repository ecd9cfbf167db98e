"""Which attempts of shards may send requests to engines, and that none does while engines are given other weights.

    driver   WeightsComing                  waits for all attempts   changes the weights   EnginesReady
    shard    sends requests   SendsNothing   waits                                          sends requests

Knows nothing of how engines are made ready, nor of what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import count

from millrace.core.errors import ActorLostError
from millrace.tasks.shards.board import Notice, SendsNothing, ShardReplacedError, WeightsComing, Writer


class Senders:
    """The attempts on one topic that have engines."""

    def __init__(self, tell: Callable[[Notice], Awaitable[None]]) -> None:
        """tell: appends a notice to the topic's."""
        self.ready = asyncio.Lock()  # held while engines are made ready for them, or given other weights
        self._tell = tell
        self._sending: set[Writer] = set()
        self._silent: set[SendsNothing] = set()
        self._numbers = count(1)
        self._lost = False
        self._changed = asyncio.Condition()

    def add(self, writers: Iterable[Writer]) -> None:
        """Note attempts that get engines."""
        self._sending |= set(writers)

    async def ended(self, writer: Writer) -> None:
        """Note that an attempt has ended, or died."""
        async with self._changed:
            self._sending.discard(writer)
            self._changed.notify_all()

    async def silent(self, notice: SendsNothing) -> None:
        """Note an attempt's answer."""
        async with self._changed:
            self._silent.add(notice)
            self._changed.notify_all()

    async def give_up(self) -> None:
        """The board is lost, or what passes over it: its shards end."""
        async with self._changed:
            self._lost = True
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def without_requests(self, amid: bool) -> AsyncIterator[None]:
        """Within, no attempt sends a request or gets engines. amid: engines keep the requests that they have.

        SGLang 0.5.17 dies when weights come while requests wait.
        """
        async with self.ready:
            number = next(self._numbers)
            with contextlib.suppress(ActorLostError, ShardReplacedError):  # its shards end with the board
                if self._sending:
                    await self._tell(WeightsComing(number, amid))
                async with self._changed:
                    await self._changed.wait_for(lambda: self._lost or self._are_silent(number))
            yield

    def _are_silent(self, number: int) -> bool:
        return all(SendsNothing(writer, number) in self._silent for writer in self._sending)
