"""A shard's end of the board: a Stream that follows the driver's, and the engines that the driver makes ready.

Owns the translation between notices and the Stream that tasks know. Knows nothing of what a shard makes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import count

from millrace.connectors.ray.actors import Actor
from millrace.connectors.sglang.client import EngineClient
from millrace.connectors.sglang.dispatcher import Dispatcher, EngineAddress
from millrace.connectors.sglang.dispatching.least_load import until_changed
from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import FileRecord
from millrace.core.errors import EngineError, EngineLostError, EngineStalledError
from millrace.core.staleness import VersionRange
from millrace.tasks.shards.board import (
    Board,
    DeferralKnown,
    Ended,
    EngineLost,
    EnginesReady,
    EnginesWanted,
    Failed,
    Known,
    Landed,
    Notice,
    Released,
    SendsNothing,
    Settled,
    ShardReplacedError,
    Topic,
    WeightsComing,
    Writer,
)
from millrace.tasks.stream import Kind, Stream

LOOK_S = 10.0  # longest wait for a notice in one call


class Link:
    """What one attempt of a shard tells the board and hears from it."""

    def __init__(self, board: Actor[Board], token: int, topic: Topic, writer: Writer) -> None:
        self._board, self._token, self._topic = board, token, topic
        self.writer = writer

    async def tell(self, *notices: Notice) -> None:
        """Append notices. Raises ShardReplacedError if this attempt counts no more, ActorLostError if the board is gone."""
        await self._board.call(Board.tell, self._token, self._topic, notices, self.writer)

    async def since(self, seen: int, timeout_s: float) -> list[Notice]:
        """The notices after the first `seen`."""
        return await self._board.call(Board.since, self._token, self._topic, seen, timeout_s, self.writer)


class MirroredStream(Stream):
    """The driver's Stream as a shard sees it. Of parts that shards wrote it has those of this shard's number alone."""

    def __init__(self, link: Link) -> None:
        super().__init__(released=0, joined=None)
        self.engines = SharedEngines(link)
        self._deferred: int | None = None
        self._link = link
        self._seen = 0

    async def follow(self) -> None:
        """Take over what the driver tells; runs until cancelled, or this attempt counts no more."""
        while True:
            await self.catch_up(LOOK_S)

    async def catch_up(self, timeout_s: float = 0.0) -> None:
        """Take over what was told so far; waits so long for something."""
        notices = await self._link.since(self._seen, timeout_s)
        self._seen += len(notices)
        for notice in notices:
            await self._take(notice)

    async def until_deferral_known(self) -> int:
        """How many groups the iteration before deferred, once that is known."""
        await self._until(lambda: self._deferred is not None, "what the iteration before defers")
        assert self._deferred is not None
        return self._deferred

    async def tell_landed(self, kind: Kind, file: FileRecord) -> None:
        """Announce a part that this shard wrote, to the driver and here."""
        await self._link.tell(Landed(kind, file, self._link.writer.shard))
        await super().land(kind, file["path"])

    async def tell_failed(self, failed: Sequence[Failed]) -> None:
        """Announce samples that failed."""
        if failed:
            await self._link.tell(*failed)

    async def _take(self, notice: Notice) -> None:
        if isinstance(notice, Known):
            for path in notice.paths:
                await super().land(notice.kind, path)
        elif isinstance(notice, Landed) and notice.shard == self._link.writer.shard:
            await super().land(notice.kind, notice.file["path"])
        elif isinstance(notice, Released):
            await self.release(notice.groups)
        elif isinstance(notice, DeferralKnown):
            self._deferred = notice.groups
            await self._notify()
        elif isinstance(notice, Settled):
            await self.settle()
        elif isinstance(notice, EnginesReady):
            await self.engines.take(notice)
        elif isinstance(notice, WeightsComing):
            await self.engines.wait_for_weights(notice)
        elif isinstance(notice, Ended) and notice.writer == self._link.writer:
            raise ShardReplacedError(f"the driver has given up {self._link.writer.work}")


class SharedEngines:
    """Engines that the driver made ready. The driver alone starts, checks and replaces them; it is told which lost a request."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._clients: dict[str, EngineClient] = {}  # by URL
        self._suspect: set[str] = set()
        self._waits = False  # for engines that are given other weights
        self._changes = 0  # of any of these
        self._lost: list[EngineLost] = []
        self._numbers = count(1)
        self._answered: dict[int, EnginesReady] = {}
        self._changed = asyncio.Condition()

    async def dispatcher(self, config: RunConfig, versions: VersionRange, address: str) -> Dispatcher:
        """A dispatcher over the engines at one of these versions; those at this address first, the shard's own node."""

        async def recover(_: int) -> None:
            await self._ask()

        await self._ask()
        return Dispatcher(
            until_changed(lambda: self._changes, partial(self._near, address)),
            recover,
            self._mark_suspect,
            version=versions.newest,
            oldest=versions.oldest,
            newest=versions.newest,
            keyed=False,
            attempts=config.rollout.attempts,
            progress_timeout_s=config.rollout.progress_timeout_s,
        )

    async def take(self, ready: EnginesReady) -> None:
        """The driver's answer, to this shard or another one."""
        kept: dict[str, EngineClient] = {}
        for engine in ready.engines:
            held = self._clients.get(engine.url)
            kept[engine.url] = held if held and held.key == engine.key else _client(engine)
        if ready.reason is None:
            gone = [client for client in self._clients.values() if client not in kept.values()]
            self._clients, self._waits = kept, False
            self._changes += 1
            await asyncio.gather(*(client.close() for client in gone))
        async with self._changed:
            for wanted in ready.wanted:
                if wanted.writer == self._link.writer:
                    self._suspect.clear()
                    self._changes += 1
                    self._answered[wanted.number] = ready
            self._changed.notify_all()

    async def wait_for_weights(self, coming: WeightsComing) -> None:
        """Send nothing until the driver's next answer. What an engine ends meanwhile goes on then."""
        self._waits = True
        self._changes += 1
        for client in self._clients.values():
            client.note_refit()
            client.refits_amid_requests += coming.amid
        await self._link.tell(SendsNothing(self._link.writer, coming.number))

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def _ask(self) -> None:
        """Have the driver make engines ready. Raises EngineError where it cannot."""
        number, lost, self._lost = next(self._numbers), self._lost, []
        await self._link.tell(*lost, EnginesWanted(self._link.writer, number))
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._answered)
        ready = self._answered.pop(number)
        if ready.reason is not None:
            raise EngineError(ready.reason)

    def _near(self, address: str) -> list[EngineClient]:
        if self._waits:
            return []
        serving = {url: client for url, client in self._clients.items() if url not in self._suspect}
        near = [client for url, client in serving.items() if f"//{address}:" in url]
        return near or list(serving.values())

    def _mark_suspect(self, client: EngineClient, error: EngineLostError) -> None:
        if client.url not in self._suspect:
            self._suspect.add(client.url)
            self._changes += 1
            stalled = isinstance(error, EngineStalledError)
            self._lost.append(EngineLost(client.engine_id, client.url, str(error), stalled))


def _client(engine: EngineAddress) -> EngineClient:
    return EngineClient(engine.url, engine.engine_id, engine.key)
