"""Shards that begin before their iteration does, while the one before hands over its weights; each waits at a seat of the board.

Prefect and Ray take some 0.1 s to begin a task, and more where there are several: no GPU would work meanwhile. Knows nothing of what
shards do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from prefect import Task

from millrace.core.config import RunConfig
from millrace.core.errors import ActorLostError
from millrace.core.pipeline.periodic import evaluates_after
from millrace.core.pipeline.sharding import in_shards, shares
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.shards.attempts import RunAny, RunShard, on_ray
from millrace.tasks.shards.board import Seat, ShardCall, Work
from millrace.tasks.shards.conversation import LAST_WORDS_S
from millrace.tasks.shards.keeper import BoardKeeper
from millrace.tasks.shards.shard import reward_shard, rollout_shard

TASKS: Mapping[Work, Task[[Any], Any]] = {"rollout": rollout_shard, "reward": reward_shard}


@contextlib.asynccontextmanager
async def begin_shards(runtime: Runtime, index: int) -> AsyncIterator[RunShard]:
    """Within, the shards of an iteration run; where that may gain something they begin at once, and wait for their work."""
    run = on_ray()
    if not begins_early(runtime.config, runtime.board, index):
        yield run
        return
    early = EarlyShards(runtime.board, run)
    early.begin(runtime.config)
    try:
        yield early.run
    finally:
        await early.close()


def begins_early(config: RunConfig, keeper: BoardKeeper, index: int) -> bool:
    """Whether shards begin before their iteration: not the first ones of a driver, which finds out then whether they can.

    With iterations ahead an engine has work meanwhile; those of an evaluation would find no process of Ray's that is ready.
    """
    may = in_shards(config) and keeper.is_there and not config.pipeline.ahead
    return may and not evaluates_after(config, index)


class EarlyShards:
    """The shards of one iteration that has not begun."""

    def __init__(self, keeper: BoardKeeper, run: RunAny) -> None:
        """run: runs those that did not begin early."""
        self._keeper, self._run = keeper, run
        self._waiting: dict[tuple[Work, int], tuple[Seat, asyncio.Task[Any]]] = {}
        self._beginning: asyncio.Task[None] | None = None
        self._nodes = contextlib.AsyncExitStack()  # known until this is closed

    def begin(self, config: RunConfig) -> None:
        """Begin them in the background."""
        self._beginning = asyncio.create_task(self._begin(config))

    async def run(self, task: Task[[Any], Any], call: ShardCall, node: str | None) -> Any:
        """Give a call to the shard that waits for it, and run it to its end. Where none does, run one on the node."""
        if self._beginning:
            await asyncio.shield(self._beginning)
        key = call.writer.work, call.writer.shard
        if key not in self._waiting:
            return await self._run(task, call, node)
        seat, running = self._waiting.pop(key)
        try:
            await self._keeper.call_to(seat, call)
            return await running
        finally:
            running.cancel()

    async def close(self) -> None:
        """Dismiss those that still wait."""
        running = [each for _, each in self._waiting.values()]
        if self._beginning:
            running.append(self._beginning)
            self._beginning.cancel()
        with contextlib.suppress(ActorLostError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                for seat, _ in self._waiting.values():
                    await self._keeper.call_to(seat, None)
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._nodes.aclose()

    async def _begin(self, config: RunConfig) -> None:
        try:
            nodes = await self._nodes.enter_async_context(self._keeper.known_nodes())
        except ActorLostError:
            return  # whoever runs them asks again
        placed = shares(nodes, config.rollout.shards)
        for work, task in TASKS.items():
            for number, each in enumerate(placed):
                seat = Seat(self._keeper.token, next(self._keeper.attempts), config.part_limit)
                running = asyncio.create_task(self._run(task, seat, each.node))
                self._waiting[work, number] = seat, running
