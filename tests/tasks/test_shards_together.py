"""Two shards and their driver in one process: shares, restarts, lost engines. Only Ray is not there: a shard is a task of this
process, and the board is in it too. test_shards.py of flows has the same with Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from aiohttp import web
from prefect import Task

from millrace.connectors.ray.actors import Actor
from millrace.connectors.sglang.client import EngineClient
from millrace.connectors.sglang.dispatcher import Dispatcher
from millrace.connectors.storage.lease import Lease
from millrace.connectors.storage.parts import list_parts, read_parts
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id
from millrace.core.errors import ActorLostError, BudgetError, EngineError, EngineLostError
from millrace.core.staleness import Ahead
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.shards.board import Board, Facts
from millrace.tasks.shards.keeper import BoardKeeper
from millrace.tasks.shards.shard import ShardCall, make_rewards, make_rollouts, shard_context
from millrace.tasks.shards.sharded import ShardedIteration
from millrace.tasks.stream import NOTHING, Stream
from tests.support.local_board import LocalBoard
from tests.support.stored_samples import drawn_group

INDEX, GROUPS, SAMPLES, VERSION = 1, 6, 4, 1
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
    """Answers every request alike; refuses those that `fails` names, and all while it is broken."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.fails: Callable[[str], bool] = lambda _: False
        self.broken = False
        self.hold: asyncio.Event | None = None
        self.version = VERSION

    def let_go(self) -> None:
        """Answer what was held."""
        assert self.hold is not None
        self.hold.set()
        self.hold = None

    async def generate(self, request: web.Request) -> web.Response:
        rid = orjson.loads(await request.read())["rid"].split("~")[0]
        if self.broken:
            raise web.HTTPServiceUnavailable
        if self.fails(rid):
            raise web.HTTPBadRequest(text="too long")
        self.asked[rid] += 1
        if self.hold and rid.endswith("-0003"):
            await self.hold.wait()
        meta = {**ANSWER["meta_info"], "weight_version": str(self.version)}
        answer = orjson.dumps({**ANSWER, "meta_info": meta})
        return web.Response(body=answer, content_type="application/json")

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.post("/generate", self.generate)])
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
        self.clients = [EngineClient(url, f"engine-{number}") for number, url in enumerate(urls)]
        self.lost: list[str] = []
        self.made_ready = 0
        self.starts: Counter[int] = Counter()
        self.dies: Callable[[ShardCall], bool] = lambda _: False
        self.running: dict[int, asyncio.Task[Any]] = {}
        board = LocalBoard()
        board.board.serve(Facts(config.for_actors(), {}, str(Path.cwd()), lease.token, "id", ""))
        self.actor = cast(Actor[Board], board)
        self.runtime.board = KeeperHere(config, self.runtime, self.actor)
        self.runtime.board.drive_as(lease.token, "id")
        self.in_shards = self._shard_runtime()
        self.ctx = self.context()

    def context(self) -> IterationContext:
        """The iteration, as a start of the driver finds it."""
        ctx = IterationContext(self.config, INDEX, self.runtime, Stream(GROUPS - 1, joined=NOTHING))
        if not ctx.folder.exists("prompts.parquet"):
            groups = [drawn_group(number) for number in range(GROUPS)]
            ctx.folder.write_table("prompts.parquet", schema.to_table(groups, "prompts"), "prompts")
        ctx.shards = ShardedIteration(ctx, self.run_shard)
        ctx.engines = self._engines  # type: ignore[method-assign]
        return ctx

    async def rollout(self, ctx: IterationContext, settle_at: int) -> Any:
        """Roll out until so many samples are stored."""
        assert ctx.shards is not None
        assert ctx.stream is not None
        working = asyncio.create_task(ctx.shards.rollout())
        try:
            await until(lambda: rows(ctx, "rollouts") >= settle_at or working.done())
            await ctx.stream.settle()
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await cast(ShardedIteration, ctx.shards).close()

    def stored(self) -> Counter[str]:
        rows = read_parts(self.ctx.folder, "rollouts", "rollouts", columns=["sample_id"])
        return Counter(rows.column("sample_id").to_pylist())

    async def run_shard(
        self, task: Task[[ShardCall], Any], call: ShardCall, _flow: Context, _node: str | None
    ) -> Any:
        number = call.writer.shard
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
            return await (make_rollouts(ctx) if name == "rollout_shard" else make_rewards(ctx))

    async def _kill(self, number: int) -> None:
        await until(lambda: bool(self.stored()))
        self.running[number].cancel()

    def _shard_runtime(self) -> Runtime:
        found = Runtime(self.config)
        found.run_folder.store.fence = self.runtime.run_folder.store.fence
        vars(found.prompts)["tokenizer"] = SimpleNamespace(decode=str)  # there is no model
        return found

    async def _engines(self) -> Dispatcher:
        self.made_ready += 1

        async def recover(_: int) -> None:
            raise AssertionError("shards generate, not the driver")

        def mark(client: EngineClient, error: EngineLostError) -> None:
            self.lost.append(client.engine_id)

        return Dispatcher(
            lambda: self.clients, recover, mark, version=VERSION, attempts=2, progress_timeout_s=60
        )


@pytest.fixture
async def engines() -> AsyncIterator[tuple[list[Engine], list[str]]]:
    made = [Engine(), Engine()]
    async with contextlib.AsyncExitStack() as stack:
        yield made, [await stack.enter_async_context(engine.served()) for engine in made]


@pytest.fixture
def make_shards(
    make_config: Callable[..., RunConfig],
    engines: tuple[list[Engine], list[str]],
) -> Callable[..., Place]:
    def made(**sections: Any) -> Place:
        rollout = {
            "prompts": GROUPS - 1,
            "samples_per_prompt": SAMPLES,
            "part_groups": 1,
            "max_failed_share": 0.2,
        }
        config = make_config(
            rollout={**rollout, **sections.pop("rollout", {})}, placement={"task_runner": "ray"}, **sections
        )
        return Place(config, engines[1])

    return made


EVERY = {sample_id(f"g{group}", index) for group in range(GROUPS - 1) for index in range(SAMPLES)}

pytestmark = pytest.mark.timeout(60)


async def test_each_sample_of_what_is_released_is_made_by_one_shard(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards()
    record = await place.rollout(place.ctx, len(EVERY))
    assert place.stored() == Counter(EVERY)
    asked = engines[0][0].asked + engines[0][1].asked
    assert asked == Counter(EVERY)
    assert record["samples_generated"] == record["tokens_generated"] == len(EVERY)
    assert sorted(file["path"] for file in record["files"]) == list_parts(place.ctx.folder, "rollouts")
    assert place.starts == {0: 1, 1: 1}


async def test_a_start_after_a_kill_generates_what_no_part_holds(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards()
    for engine in engines[0]:
        engine.hold = asyncio.Event()
    few = asyncio.create_task(place.rollout(place.ctx, 10_000))
    await until(lambda: sum(place.stored().values()) >= 3 * (GROUPS - 1))
    few.cancel()
    await asyncio.gather(few, return_exceptions=True)
    for engine in engines[0]:
        engine.let_go()
    record = await place.rollout(place.context(), len(EVERY))
    assert place.stored() == Counter(EVERY)
    assert record["samples_found"] == 3 * (GROUPS - 1)
    assert record["samples_generated"] == GROUPS - 1


async def test_a_shard_that_dies_is_started_again_and_finds_its_parts(
    make_shards: Callable[..., Place],
    engines: tuple[list[Engine], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = make_shards()
    for engine in engines[0]:
        engine.hold = asyncio.Event()
    place.dies = lambda call: call.writer == type(call.writer)("rollout", 0, 1)
    working = asyncio.create_task(place.rollout(place.ctx, len(EVERY)))
    await until(lambda: place.starts[0] == 2)
    for engine in engines[0]:
        engine.let_go()
    await working
    assert place.stored() == Counter(EVERY)
    assert place.starts == {0: 2, 1: 1}
    assert "shard 0 of rollout: its process died; starting it again" in caplog.text


async def test_a_shard_that_dies_again_and_again_ends_the_task(make_shards: Callable[..., Place]) -> None:
    place = make_shards()

    async def dead(*_: Any) -> Any:
        raise ActorLostError("its process died")

    place.ctx.shards = ShardedIteration(place.ctx, dead)
    with pytest.raises(ActorLostError, match="its task was tried 3 times"):
        await place.rollout(place.ctx, len(EVERY))


async def test_an_engine_that_loses_a_request_is_reported_and_the_sample_made_elsewhere(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards()
    engines[0][0].broken = True

    async def repaired() -> None:
        await until(lambda: bool(place.lost))
        engines[0][0].broken = False

    repairing = asyncio.create_task(repaired())
    await place.rollout(place.ctx, len(EVERY))
    await repairing
    assert set(place.lost) == {"engine-0"}
    assert place.stored() == Counter(EVERY)


async def test_a_shard_generates_by_the_versions_that_the_driver_allows_though_they_changed_in_its_course(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards(pipeline={"ahead": 1, "on_update": "finish"})
    place.runtime.prompts.use_ahead(Ahead(((0, 1),)))
    for engine in engines[0]:
        engine.version = VERSION - place.config.steps_per_iteration
    await place.rollout(place.ctx, len(EVERY))
    rows = read_parts(place.ctx.folder, "rollouts", "rollouts").to_pylist()
    made_by = {span["version"] for row in rows for span in row["policy_versions"]}
    assert made_by == {VERSION - place.config.steps_per_iteration}


async def test_samples_that_fail_are_counted_over_all_shards(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards(rollout={"max_failed_share": 0.1})  # of 20 samples 2
    for engine in engines[0]:
        engine.fails = lambda rid: rid in {"g0-0000", "g1-0000", "g2-0000"}
    with pytest.raises(BudgetError, match="3 samples failed to generate"):
        await place.rollout(place.ctx, 10_000)


async def test_engines_that_cannot_be_made_ready_fail_the_samples_with_the_reason(
    make_shards: Callable[..., Place],
) -> None:
    place = make_shards(rollout={"max_failed_share": 0.01})

    async def none() -> Dispatcher:
        raise EngineError("engine-0 does not start")

    place.ctx.engines = none  # type: ignore[method-assign]
    with pytest.raises(BudgetError, match="engine-0 does not start"):
        await place.rollout(place.ctx, 10_000)


async def test_rewards_of_all_shards_are_one_record(make_shards: Callable[..., Place]) -> None:
    place = make_shards(reward={"workers": 1})
    ctx = place.ctx
    await place.rollout(ctx, len(EVERY))
    again = place.context()
    assert again.shards is not None
    assert again.stream is not None
    scoring = asyncio.create_task(again.shards.reward())
    await until(lambda: rows(again, "rewards") >= len(EVERY) or scoring.done())
    await again.stream.settle()
    record = await scoring
    assert record["scored"] == len(EVERY)
    scored = read_parts(ctx.folder, "rewards", "rewards").column("sample_id").to_pylist()
    assert Counter(scored) == Counter(EVERY)
    await cast(ShardedIteration, again.shards).close()
