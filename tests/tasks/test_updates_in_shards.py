"""Engines that are given other weights while shards have requests there: no shard sends one meanwhile, and each token has its version."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.connectors.engines.dispatcher import Dispatcher, EngineAddress
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.ray.actors import Actor
from millrace.connectors.storage.parts import read_parts
from millrace.core.accounts.staleness import Ahead
from millrace.core.config import RunConfig
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.topics import Batch
from millrace.core.errors import BudgetError
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.shards.attempts import DriverSide
from millrace.tasks.shards.board import Attempt, Board, BoardState, EngineRequest, Link
from millrace.tasks.shards.board import EnginesState as EnginesOfDriver
from millrace.tasks.shards.shard import ShardEngines
from millrace.tasks.stream import Stream
from tests.support.local_board import TOKEN, LocalBoard, facts
from tests.support.shards_here import GROUPS, PARTIAL, SAMPLES, Engine, Place, until

HELD = {sample_id(f"g{group}", SAMPLES - 1) for group in range(GROUPS - 1)}
EVERY = {sample_id(f"g{group}", index) for group in range(GROUPS - 1) for index in range(SAMPLES)}
Engines = tuple[list[Engine], list[str]]

TOPIC = Batch(1)

pytestmark = pytest.mark.timeout(60)


def one_ahead(make_shards: Callable[..., Place], engines: list[Engine], on_update: str) -> Place:
    """An iteration one ahead of the trainer, all but the last sample of whose groups finish at version 0."""
    place = make_shards(pipeline={"ahead": 1, "on_update": on_update})
    place.runtime.prompts.use_ahead(Ahead(((0, 1),)))
    for engine in engines:
        engine.version, engine.hold = 0, asyncio.Event()
    return place


async def all_sent(place: Place, engines: list[Engine]) -> asyncio.Task[Any]:
    """The rollout, once every sample was asked for."""
    working = asyncio.create_task(place.rollout(place.ctx, len(EVERY)))
    await until(lambda: set(sent(engines)) == EVERY)
    return working


def sent(engines: list[Engine]) -> Counter[str]:
    return sum((engine.asked for engine in engines), Counter[str]())


async def test_a_cut_request_goes_on_under_the_new_weights_and_none_is_sent_before(
    make_shards: Callable[..., Place], engines: Engines
) -> None:
    place = one_ahead(make_shards, engines[0], "resend")
    working = await all_sent(place, engines[0])
    async with place.runtime.board.weights_change():
        for engine in engines[0]:
            engine.end_all()
        await asyncio.sleep(0.3)
        assert sum(sent(engines[0]).values()) == len(EVERY)
        for engine in engines[0]:
            engine.version = 1
            engine.let_go()
    await working
    assert sent(engines[0]) == Counter(EVERY) + Counter(HELD)
    rows = {row["sample_id"]: row for row in read_parts(place.ctx.folder, "rollouts", "rollouts").to_pylist()}
    assert set(rows) == EVERY
    for sample, row in rows.items():
        versions = [span["version"] for span in row["policy_versions"]]
        assert versions == ([0, 1] if sample in HELD else [0])
        assert row["tokens"] == [1, 2, *(PARTIAL if sample in HELD else []), 5]
    assert place.starts == {0: 1, 1: 1}


async def test_an_engine_that_keeps_its_requests_and_does_not_tell_versions_is_refused(
    make_shards: Callable[..., Place], engines: Engines
) -> None:
    place = one_ahead(make_shards, engines[0], "retract")
    working = await all_sent(place, engines[0])
    async with place.runtime.board.weights_change():
        for engine in engines[0]:
            engine.version = 1
    for engine in engines[0]:
        engine.let_go()
    with pytest.raises(BudgetError, match="does not say which made which token"):
        await working


async def test_a_shard_that_dies_or_asked_for_no_engine_is_not_waited_for(
    make_shards: Callable[..., Place], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = one_ahead(make_shards, engines[0], "resend")
    async with place.runtime.board.weights_change():
        assert not place.runtime.board.pauses  # there is no shard
    working = await all_sent(place, engines[0])
    dying: Any = place.running[0]
    take = ShardEngines.take

    async def deaf(self: ShardEngines, known: EnginesOfDriver) -> None:
        """Shard 0 dies instead of saying that it is idle."""
        if known.updating and self._attempt.shard == 0 and not dying.done():
            dying.cancel()
        else:
            await take(self, known)

    monkeypatch.setattr(ShardEngines, "take", deaf)
    async with place.runtime.board.weights_change():
        assert dying.done()
        for engine in engines[0]:
            engine.version = 1
            engine.let_go()
    await working
    assert place.stored() == Counter(EVERY)
    assert place.starts == {0: 2, 1: 1}


ATTEMPT = Attempt("rollout", 0, 1)
ENGINE = EngineAddress("engine-0", "http://a", None)


class Driver:
    """A driver's side of a topic and its board, without a shard; `ready` holds up the engines."""

    def __init__(self, config: RunConfig) -> None:
        self.ready = asyncio.Event()
        self.board = LocalBoard()
        self.link = Link(cast(Actor[Board], self.board), TOKEN, TOPIC)
        ctx = IterationContext(Runtime(config), 1, Stream(released=0))
        self.side = DriverSide(ctx, self.link, ctx.stream, self._engines)

    async def _engines(self) -> Dispatcher:
        await self.ready.wait()
        return cast(Dispatcher, SimpleNamespace(addresses=lambda: [ENGINE]))

    async def ask(self) -> None:
        request = EngineRequest(ATTEMPT, 1)
        await self.link.call(Board.tell, BoardState(requests=(request,)), ATTEMPT)

    async def says(self, holds: Callable[[EnginesOfDriver], bool]) -> None:
        """Wait until it holds of what the driver says about engines."""
        seen = 0
        while True:
            new = await self.link.call(Board.wait, seen, 10)
            if holds(new.engines):
                return
            seen = new.revision

    async def update(self) -> None:
        async with self.side.without_requests(amid=False):
            pass


@pytest.fixture
async def driver(make_config: Callable[..., RunConfig]) -> AsyncIterator[Driver]:
    found = Driver(make_config())
    await found.side.open()
    await found.side.start(ATTEMPT)
    yield found
    await found.side.close()


async def test_an_update_waits_for_an_attempt_that_has_engines_and_a_lost_board_ends_the_wait(
    driver: Driver,
) -> None:
    driver.ready.set()
    await driver.ask()
    await driver.says(lambda engines: bool(engines.replies))
    updating = asyncio.create_task(driver.update())
    await driver.says(lambda engines: engines.updating)
    await asyncio.sleep(0.05)
    assert not updating.done()
    driver.board.board.serve(facts(TOKEN + 1))
    await updating


async def test_an_update_does_not_wait_for_an_attempt_that_died_before_it_got_the_engines_it_asked_for(
    driver: Driver,
) -> None:
    """It was counted among those that send requests when they were ready, and the update waited for ever."""
    await driver.ask()
    await driver.side.catch_up()
    await driver.side.ended(ATTEMPT)
    driver.ready.set()
    await driver.says(lambda engines: bool(engines.replies))
    await driver.update()


async def test_a_shard_that_reads_only_after_an_update_notes_it_and_keeps_the_connection() -> None:
    board = LocalBoard()
    board.board.open(TOKEN, TOPIC)
    board.board.start(TOKEN, TOPIC, ATTEMPT)
    shard = ShardEngines(Link(cast(Actor[Board], board), TOKEN, TOPIC), ATTEMPT, SglangClient)
    await shard.take(EnginesOfDriver(1, (ENGINE,)))
    (client,) = shard._clients.values()
    before = client.refit, client.refits_amid_requests
    after = EnginesOfDriver(3, (ENGINE,), updates=1, updates_amid=1)
    for known in (after, after, EnginesOfDriver(2, updates=1, updates_amid=1, updating=True)):
        await shard.take(known)
    assert shard._near("") == [client]
    assert client.refit > before[0]
    assert client.refits_amid_requests == before[1] + 1
    assert board.board.wait(TOKEN, TOPIC, 0, 0).idle == ()
    await shard.close()
