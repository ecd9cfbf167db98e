"""Two shards and their driver in one process: only Ray is not there. A shard is a task of this process, and the board is in it too."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
from aiohttp import web
from prefect import Task

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.huggingface.answer_ends import AnswerEnds
from millrace.connectors.ray.actors import Actor
from millrace.connectors.storage.lease import Lease
from millrace.connectors.storage.parts import list_parts, read_parts
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.errors import ActorLostError, EngineLostError
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.shards.board import Board, BoardKeeper, Facts, ShardCall
from millrace.tasks.shards.driver import ShardedIteration
from millrace.tasks.shards.shard import (
    ShardContext,
    make_evaluation,
    make_rewards,
    make_rollouts,
    shard_context,
)
from millrace.tasks.stream import NOTHING, Joined, Stream
from tests.support.local_board import LocalBoard
from tests.support.stored_samples import drawn_group

INDEX, GROUPS, SAMPLES, VERSION = 1, 6, 4, 1
PARTIAL = [7, 8, 9]
ANSWER: dict[str, Any] = {
    "text": "2",
    "meta_info": {
        "id": "x",
        "output_token_logprobs": [[-0.5, 5, None]],
        "finish_reason": {"type": "stop"},
        "weight_version": str(VERSION),
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "cached_tokens": 0,
    },
}


class Engine:
    """Answers every request alike; refuses those that `fails` names, and all while it is broken; keeps those that `holds` names waiting.

    One that is kept waiting and aborted has the tokens PARTIAL.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.given: dict[str, list[int]] = {}  # the newest input ids of each sample
        self._aborted: dict[str, asyncio.Event] = {}
        self.fails: Callable[[str], bool] = lambda _: False
        self.broken = False
        self.hold: asyncio.Event | None = None
        self.holds: Callable[[str], bool] = lambda rid: rid.endswith("-0003")
        self.version = VERSION

    def let_go(self) -> None:
        """Answer what was held."""
        assert self.hold is not None
        self.hold.set()
        self.hold = None

    async def generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        rid = body["rid"].split("~")[0]
        if self.broken:
            raise web.HTTPServiceUnavailable
        if self.fails(rid):
            raise web.HTTPBadRequest(text="too long")
        self.asked[rid] += 1
        self.given[rid] = body["input_ids"]
        meta = {**ANSWER["meta_info"], "weight_version": str(self.version)}
        if self.hold and self.holds(rid) and await self._waits(self.hold, body["rid"]):
            partial = [[-0.25, token, None] for token in PARTIAL]
            meta |= {"output_token_logprobs": partial, "completion_tokens": len(partial)}
            meta["finish_reason"] = {"type": "abort"}
        answer = orjson.dumps({**ANSWER, "meta_info": meta})
        return web.Response(body=answer, content_type="application/json")

    async def _waits(self, hold: asyncio.Event, rid: str) -> bool:
        """Until it is let go or aborted; whether it was aborted."""
        aborted = self._aborted[rid] = asyncio.Event()
        waits = [asyncio.create_task(event.wait()) for event in (hold, aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return aborted.is_set()

    def end_all(self) -> None:
        """End what is kept waiting, as an update that cuts does."""
        for event in self._aborted.values():
            event.set()

    async def abort(self, request: web.Request) -> web.Response:
        rid = orjson.loads(await request.read())["rid"]
        if rid in self._aborted:
            self._aborted[rid].set()
        return web.Response()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.post("/generate", self.generate), web.post("/abort_request", self.abort)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what it waits for tells nobody
        await asyncio.sleep(0.01)


def rows(ctx: IterationContext, kind: str) -> int:
    """Rows of the parts that count."""
    return sum(file["rows"] or 0 for file in ctx.parts[kind])


MAKES: dict[str, Callable[[ShardContext], Awaitable[Any]]] = {
    "rollout_shard": make_rollouts,
    "reward_shard": make_rewards,
    "evaluate_shard": make_evaluation,
}


class KeeperHere(BoardKeeper):
    """Of a board in this process, and two nodes."""

    def __init__(self, config: RunConfig, runtime: Runtime, board: Actor[Board]) -> None:
        super().__init__(config, runtime._cluster, runtime.prompts)
        self._here = board

    async def board(self) -> Actor[Board]:
        return self._here

    async def nodes(self) -> list[str]:
        return ["a", "b"]


class Place:
    """An iteration of a run that this process drives, with the groups drawn, and two engines."""

    def __init__(self, config: RunConfig, urls: list[str]) -> None:
        self.config = config
        self.runtime = Runtime(config)
        lease = Lease.take(self.runtime.run_folder.store)
        self.runtime.run_folder.store.fence = lease
        self.clients = [SglangClient(url, f"engine-{number}") for number, url in enumerate(urls)]
        self.lost: list[str] = []
        self.made_ready = 0
        self.starts: Counter[int] = Counter()
        self.dies: Callable[[ShardCall], bool] = lambda _: False
        self.running: dict[int, asyncio.Task[Any]] = {}
        board = LocalBoard()
        self.facts = Facts(config.for_actors(), {}, str(Path.cwd()), lease.token, "id", "")
        board.board.serve(self.facts)
        self.actor = cast(Actor[Board], board)
        self.runtime.board = KeeperHere(config, self.runtime, self.actor)
        self.runtime.board.drive_as(lease.token, "id")
        vars(self.runtime.prompts)["tokenizer"] = SimpleNamespace(
            decode=lambda ids, _: str(ids), ends=AnswerEnds()
        )  # there is no model
        self.in_shards = self._shard_runtime()
        self.ctx = self.context()

    def context(self, index: int = INDEX, joined: Joined | None = NOTHING) -> IterationContext:
        """The iteration, as a start of the driver finds it."""
        ctx = IterationContext(self.runtime, index, Stream(GROUPS - 1, joined=joined))
        if not ctx.folder.exists("prompts.parquet"):
            first = (index - INDEX) * GROUPS  # number of the first group of the draw
            groups = [drawn_group(first + n, ordinal=n, iteration=index) for n in range(GROUPS)]
            ctx.folder.write_table("prompts.parquet", schema.to_table(groups, "prompts"), "prompts")
        ctx.engines_at = self._engines  # type: ignore[method-assign]
        return ctx.working_in(ShardedIteration(ctx, self.run_shard))

    async def rollout(self, ctx: IterationContext, settle_at: int) -> Any:
        """Roll out until so many samples are stored."""
        assert ctx.shards is not None
        working = asyncio.create_task(ctx.shards.rollout())
        try:
            await until(lambda: rows(ctx, "rollouts") >= settle_at or working.done())
            await ctx.stream.settle()
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await cast(ShardedIteration, ctx.shards).close()

    def stored(self, ctx: IterationContext | None = None) -> Counter[str]:
        """How often each sample is stored, of the place's iteration or another one."""
        rows = read_parts((ctx or self.ctx).folder, "rollouts", "rollouts", columns=["sample_id"])
        return Counter(rows.column("sample_id").to_pylist())

    async def run_shard(self, task: Task[[Any], Any], call: ShardCall, _node: str | None) -> Any:
        number = call.attempt.shard
        self.starts[number] += 1
        self.running[number] = asyncio.create_task(self._work(task.name, call))
        if self.dies(call):
            asyncio.get_running_loop().create_task(self._kill(number))
        try:
            return await self.running[number]
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                self.running[number].cancel()
                raise
            raise ActorLostError("its process died") from None

    async def _work(self, name: str, call: ShardCall) -> Any:
        async with shard_context(call, self.actor, self.in_shards, "127.0.0.1") as ctx:
            return await MAKES[name](ctx)

    async def _kill(self, number: int) -> None:
        folders = ("rollouts", "evaluations")
        await until(lambda: any(list_parts(self.ctx.folder, folder) for folder in folders))
        self.running[number].cancel()

    def _shard_runtime(self) -> Runtime:
        found = Runtime(self.config)
        found.run_folder.store.fence = self.runtime.run_folder.store.fence
        vars(found.prompts)["tokenizer"] = SimpleNamespace(decode=lambda ids, _: str(ids), ends=AnswerEnds())
        return found

    async def _engines(self, _: VersionRange) -> Dispatcher:
        self.made_ready += 1

        async def recover(_: int) -> None:
            raise AssertionError("shards generate, not the driver")

        def mark(client: SglangClient, error: EngineLostError) -> None:
            self.lost.append(client.engine_id)

        return Dispatcher(
            lambda: self.clients, recover, mark, version=VERSION, attempts=2, progress_timeout_s=60
        )
