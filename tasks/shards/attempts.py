"""The shards of one topic: started as Ray tasks, started again where they die, and which of their parts count.

Owns the attempts of shards, and that a part counts once: what a shard wrote before it died counts, what an attempt that was
replaced writes later is removed. Knows nothing of how a shard works.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from itertools import count
from typing import Any, TypeVar

from prefect import Task

from millrace.connectors.ray.task_runs import run_on_ray
from millrace.connectors.sglang.dispatcher import Dispatcher
from millrace.connectors.storage.parts import list_parts, replace_attempt
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import ActorLostError, only_first_error
from millrace.core.pipeline.sharding import PlacedShare, shares
from millrace.core.staleness import VersionRange
from millrace.tasks.context import IterationContext
from millrace.tasks.run_recorded import after_tries
from millrace.tasks.shards.board import Seat, ShardCall, Topic, Work, Writer
from millrace.tasks.shards.conversation import Conversation
from millrace.tasks.shards.keeper import IMPORTS
from millrace.tasks.stream import Kind, Stream

log = logging.getLogger(__name__)
STARTS = 3  # of a shard, in one try of its task
Record = TypeVar("Record")
RunShard = Callable[[Task[[Any], Any], ShardCall, str | None], Awaitable[Any]]
"""Runs a shard to its end on a node, or raises ActorLostError where it dies."""
RunAny = Callable[[Task[[Any], Any], ShardCall | Seat, str | None], Coroutine[Any, Any, Any]]
"""The same, also for a shard that waits for its call."""


def on_ray() -> RunAny:
    """Runs shards as tasks of the flow run that this is called in. Called outside of its tasks: see run_on_ray."""
    flow = copy_context()

    async def run(task: Task[[Any], Any], call: ShardCall | Seat, node: str | None) -> Any:
        return await run_on_ray(task, call, flow, node, IMPORTS)

    return run


class Attempts:
    """The shards that work on one topic."""

    def __init__(
        self,
        ctx: IterationContext,
        topic: Topic,
        stream: Stream,
        versions: Callable[[], VersionRange],
        run: RunShard,
    ) -> None:
        """stream: what shards are to follow. versions: of the weights that generate."""
        self._ctx, self._topic, self._stream = ctx, topic, stream
        self._versions, self._run_shard = versions, run
        self._opening = asyncio.Lock()
        self._unfinished: list[Writer] = []  # attempts that have not ended well, and may still write
        self._talk: Conversation | None = None

    async def close(self) -> None:
        """Give up what still works."""
        if self._talk:
            known = self._ctx.runtime.board.senders
            if self._talk.senders in known:
                known.remove(self._talk.senders)
            await self._talk.close()

    def counted(self, kind: Kind, listed: Sequence[str]) -> list[str]:
        """Of the parts that a listing shows, those that count."""
        return self._talk.counted(kind, listed) if self._talk else list(listed)

    async def conversation(self) -> Conversation:
        """The conversation with the shards; a new one where the board was lost."""
        async with self._opening:
            if self._talk and self._talk.failed:
                await self.close()
                self._talk = None
            if self._talk is None:
                keeper = self._ctx.runtime.board
                talk = Conversation(
                    self._ctx, await keeper.board(), keeper.token, self._topic, self._stream, self._engines
                )
                await talk.open()
                self._talk = talk
                keeper.senders.append(talk.senders)
            return self._talk

    async def note_earlier(self, work: Work, kinds: Sequence[Kind]) -> None:
        """Before a task is tried again: note which parts count of the attempts that the try before left. What these still write does
        not. kinds: of the parts that they write."""
        earlier = [writer for writer in self._unfinished if writer.work == work]
        for kind in kinds if earlier else ():
            await asyncio.to_thread(self._ctx.start_parts, kind)
        for writer in earlier:
            await self._note_replaced(writer, kinds)

    async def count_stored(self, talk: Conversation, kind: Kind) -> None:
        """Count the parts that the context lists."""
        files = self._ctx.parts[kind]
        self._stream.add_listed(kind, [file["path"] for file in files])
        await talk.know(kind, files)

    async def run(
        self,
        talk: Conversation,
        task: Task[[Any], Coroutine[Any, Any, Record]],
        work: Work,
        kinds: Sequence[Kind],
    ) -> list[Record]:
        """Run all shards of one kind of work to their end; their records. kinds: of the parts that they write."""
        placed = shares(await self._ctx.runtime.board.nodes(), self._ctx.config.rollout.shards)
        with only_first_error():
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._shard(talk, task, work, kinds, number, each))
                    for number, each in enumerate(placed)
                ]
                watching = group.create_task(talk.until_failed())
                records = list(await asyncio.gather(*running))
                watching.cancel()
        await talk.catch_up()
        for kind in kinds:
            await self.remove_strays(talk, kind)
        return records

    async def _engines(self) -> Dispatcher:
        return await self._ctx.engines_at(self._versions())

    async def _shard(
        self,
        talk: Conversation,
        task: Task[[Any], Coroutine[Any, Any, Record]],
        work: Work,
        kinds: Sequence[Kind],
        number: int,
        placed: PlacedShare,
    ) -> Record:
        """Run one shard to its end, again where its process or node dies."""
        ctx, keeper = self._ctx, self._ctx.runtime.board
        for start in count(1):
            writer = Writer(work, number, next(keeper.attempts))
            await talk.begin(writer)
            self._unfinished.append(writer)
            limit = ctx.config.part_limit
            call = ShardCall(keeper.token, self._topic, writer, placed.share, self._versions(), limit)
            try:
                record: Record = await self._run_shard(task, call, placed.node)
                self._unfinished.remove(writer)
                return record
            except ActorLostError as error:
                if start == STARTS or talk.failed:
                    raise ActorLostError(
                        f"shard {number} of {work}: {error}", remedy=after_tries(start)
                    ) from None
                log.warning(
                    "iteration %d, shard %d of %s: %s; starting it again",
                    iteration_number(ctx.index),
                    number,
                    work,
                    error,
                )
                await self.take_in_written(talk, kinds)
                await self._note_replaced(writer, kinds)
            except BaseException:
                await talk.end(writer)
                raise
            finally:
                await talk.senders.ended(writer)
        raise AssertionError("the last start returns or raises")

    async def take_in_written(self, talk: Conversation, kinds: Sequence[Kind]) -> None:
        """Count the parts that a dead shard had written without reporting them."""
        await talk.catch_up()
        for kind in kinds:
            for path in await self._uncounted(talk, kind):
                entry = await asyncio.to_thread(self._ctx.folder.entry, path)
                await talk.take_in(kind, entry.record())
                await talk.show(kind, [path])

    async def _note_replaced(self, writer: Writer, kinds: Sequence[Kind]) -> None:
        """Note for later drivers which parts of an attempt count. Others that a listing shows later are of samples that the next
        attempt makes."""
        ctx = self._ctx
        parts: dict[str, list[str]] = {kind: [file["path"] for file in ctx.parts[kind]] for kind in kinds}
        token, run = ctx.runtime.board.token, ctx.run_folder.owner.run_id
        await asyncio.to_thread(replace_attempt, ctx.folder, token, writer.attempt, parts, run)
        self._unfinished.remove(writer)

    async def remove_strays(self, talk: Conversation, kind: Kind) -> None:
        """Remove parts that a replaced attempt never reported: another attempt has generated their samples."""
        for path in await self._uncounted(talk, kind):
            log.warning(
                "removing %s: the shard that wrote it had been replaced", self._ctx.folder.url_of(path)
            )
            await asyncio.to_thread(self._ctx.folder.remove, path)

    async def _uncounted(self, talk: Conversation, kind: Kind) -> Sequence[str]:
        listed = await asyncio.to_thread(list_parts, self._ctx.folder, kind)
        return [path for path in listed if not talk.counts(kind, path)]
