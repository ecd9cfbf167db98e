"""The driver's hold on the board of its run: found or made, and belonging to this driver.

Owns which board there is, where shards go, and whether Prefect can begin tasks there. Knows nothing of iterations.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from contextvars import Context
from itertools import count
from typing import get_args

from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace.connectors.ray import actors, placement
from millrace.connectors.ray.task_runs import NotBegunError, run_on_ray
from millrace.core.config import RunConfig
from millrace.core.config.placement import is_clients
from millrace.core.errors import ActorLostError
from millrace.tasks.runtime.cluster import Cluster
from millrace.tasks.runtime.prompts import Prompts
from millrace.tasks.shards.board import Board, Facts, Seat, ShardCall, Work
from millrace.tasks.shards.senders import Senders

BOARD = "board"  # role of its actor
IMPORTS = (  # of the processes that work for shards; a tokenizer's take a second
    "millrace.tasks.shards.shard",
    "transformers.tokenization_utils_tokenizers",
)
REACH_S = 60.0  # for a task that does nothing to begin on a node: Prefect's client tries for minutes where nothing answers
SPARE_THREADS = 16  # for calls that do not wait


@task(name="reach_server", cache_policy=NO_CACHE)
async def reach_server(_: None) -> None:
    """Begins where Prefect's server answers, and does nothing."""


class BoardKeeper:
    """The board of one run, made when the first iteration needs it."""

    def __init__(self, config: RunConfig, cluster: Cluster, prompts: Prompts) -> None:
        self.token = 0
        self._config, self._cluster, self._prompts = config, cluster, prompts
        self._run_id = ""
        self._board: actors.Actor[Board] | None = None
        self._making = asyncio.Lock()
        self.senders: list[Senders] = []  # of each topic that is open
        # numbers of attempts: a shard that starts late must not pass for one of a later board
        self.attempts = count(1)
        self._nodes: list[str] | None = None  # where they are known
        self._asked: dict[str, str | None] = {}  # by node: why Prefect cannot begin a task there

    def drive_as(self, token: int, run_id: str) -> None:
        """Belong to the driver with this token."""
        self.token, self._run_id = token, run_id

    async def board(self) -> actors.Actor[Board]:
        """The board, which answers. One that is lost is made again, and has forgotten all."""
        async with self._making:
            if self._board is not None:
                try:
                    await self._board.state()
                except ActorLostError:
                    self._board = None
            if self._board is None:
                await self._cluster.join()
                found = await self._cluster.find_alive(BOARD, 0, Board)
                board = found or await self._make()
                facts = await asyncio.to_thread(self._facts)  # the tokenizer may have to be loaded for it
                await board.call(Board.serve, facts)
                self._board = board
            return self._board

    @property
    def is_there(self) -> bool:
        """Whether an iteration of this driver had shards."""
        return self._board is not None

    async def call_to(self, seat: Seat, call: ShardCall | None) -> None:
        """Give the shard at a seat its call; None if there will be none. Raises ActorLostError without a board."""
        if self._board is None:
            raise ActorLostError("the board of the run is gone")
        await self._board.call(Board.call_to, seat, call)

    @contextlib.asynccontextmanager
    async def weights_change(self) -> AsyncIterator[None]:
        """Within, engines may be given other weights: no shard sends a request."""
        amid = self._config.pipeline.on_update == "retract"  # with keep there are no shards
        async with contextlib.AsyncExitStack() as held:
            for senders in list(self.senders):
                await held.enter_async_context(senders.without_requests(amid))
            yield

    async def why_not(self, flow: Context) -> str | None:
        """Why a shard could not begin on a node that has engines; None if all can. flow: as run_on_ray takes it."""
        nodes = await self.nodes()
        unknown = [node for node in dict.fromkeys(nodes) if node not in self._asked]
        self._asked |= zip(
            unknown, await asyncio.gather(*(self._ask(node, flow) for node in unknown)), strict=True
        )
        return next((reason for node in nodes if (reason := self._asked[node])), None)

    async def _ask(self, node: str, flow: Context) -> str | None:
        if not is_clients(self._config.placement.ray_address) and node == placement.here().node:
            return None  # this process has begun its flow run
        with contextlib.suppress(ActorLostError):  # a shard is started elsewhere then
            try:
                async with asyncio.timeout(REACH_S):
                    await run_on_ray(reach_server, None, flow, node, IMPORTS)
            except NotBegunError as error:
                return f"on node {node[:8]}: {error.reason}"
            except TimeoutError:
                return f"on node {node[:8]}: Prefect's server did not answer there for {REACH_S:g} s"
        return None

    async def nodes(self) -> list[str]:
        """The nodes of the engines, one each; none where engines run outside the run."""
        return await self._look_up_nodes() if self._nodes is None else self._nodes

    @contextlib.asynccontextmanager
    async def known_nodes(self) -> AsyncIterator[Sequence[str]]:
        """The nodes of the engines, which nobody within looks up again: Ray's head is asked five times for them.

        The next one may be entered before this one is left.
        """
        self._nodes = mine = await self._look_up_nodes()
        try:
            yield mine
        finally:
            if self._nodes is mine:
                self._nodes = None

    async def _look_up_nodes(self) -> list[str]:
        if self._config.engines.kind == "external":
            return []
        await self._cluster.join()
        return [place.node for place in await self._cluster.places("engine")]

    async def _make(self) -> actors.Actor[Board]:
        """A board with a thread for each call that waits: of each iteration that is open or waits for one, one a shard of each kind
        of work, and one for each of its two topics."""
        config = self._config
        shards = config.rollout.shards or len(set(await self.nodes())) or 1
        threads = (config.pipeline.ahead + 2) * (len(get_args(Work)) * shards + 2) + SPARE_THREADS
        limit = config.part_limit
        return actors.make(
            BOARD, 0, 1, Board, self._cluster.settings, placement.here(), limit=limit, threads=threads
        )

    def _facts(self) -> Facts:
        return Facts(
            settings=dict(self._cluster.settings),
            environment=actors.passed_environment(self._cluster.settings),
            folder=os.getcwd(),
            token=self.token,
            run_id=self._run_id,
            seed_name=self._prompts.seed_name,
            tokenizer_kind=self._prompts.tokenizer.kind,
        )
