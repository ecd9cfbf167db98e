"""Engines that are given other weights while shards have requests there: no shard sends one meanwhile, and each token has its version."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from millrace.connectors.storage.parts import read_parts
from millrace.core.contracts.ids import sample_id
from millrace.core.errors import BudgetError
from millrace.core.staleness import Ahead
from millrace.tasks.shards.board import Notice, SendsNothing, WeightsComing, Writer
from millrace.tasks.shards.senders import Senders
from tests.support.shards_here import GROUPS, PARTIAL, SAMPLES, Engine, Place, until

HELD = {sample_id(f"g{group}", SAMPLES - 1) for group in range(GROUPS - 1)}
EVERY = {sample_id(f"g{group}", index) for group in range(GROUPS - 1) for index in range(SAMPLES)}
Engines = tuple[list[Engine], list[str]]

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
    make_shards: Callable[..., Place], engines: Engines
) -> None:
    place = one_ahead(make_shards, engines[0], "resend")
    async with place.runtime.board.weights_change():
        assert not place.runtime.board.senders  # there is no shard
    working = await all_sent(place, engines[0])
    dying: Any = place.running[0]
    senders: Any = place.runtime.board.senders[0]
    heard = senders.silent

    async def deaf(notice: SendsNothing) -> None:
        """Shard 0 dies instead of answering."""
        if notice.writer.shard == 0 and not dying.done():
            dying.cancel()
        else:
            await heard(notice)

    senders.silent = deaf
    async with place.runtime.board.weights_change():
        assert dying.done()
        for engine in engines[0]:
            engine.version = 1
            engine.let_go()
    await working
    assert place.stored() == Counter(EVERY)
    assert place.starts == {0: 2, 1: 1}


async def test_a_lost_board_ends_the_wait() -> None:
    told: list[Notice] = []

    async def tell(notice: Notice) -> None:
        told.append(notice)

    async def update() -> None:
        async with senders.without_requests(amid=False):
            pass

    senders = Senders(tell)
    senders.add([Writer("rollout", 0, 1)])
    updating = asyncio.create_task(update())
    await until(lambda: bool(told))
    await asyncio.sleep(0.05)
    assert not updating.done()
    await senders.give_up()
    await updating
    assert told == [WeightsComing(1, amid=False)]
