"""Engines that only prefill, paired with those that decode. What SGLang demands of a pair is kept here by a gate in front
of each embedded engine, which then answers; on a GPU the same is asked of SGLang (tests/gpu/test_two_gpus.py)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millrace.connectors.engines.external import ExternalEngine
from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.errors import EngineError
from tests.support.engine_gates import Rooms, open_gates
from tests.support.engine_process import embedded_engine, reference_logprobs
from tests.support.fleets import LONG, PROMPT, SHORT, generate, recovery, serving
from tests.support.local_handle import fleet_config

pytestmark = pytest.mark.slow  # four engines


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("engines")
    with contextlib.ExitStack() as stack:
        logs = (folder / f"{index}.log" for index in range(4))
        yield [stack.enter_context(embedded_engine(tiny_model, log=log))[0] for log in logs]


Pairs = Callable[..., "tuple[Fleet, Rooms]"]


@pytest_asyncio.fixture
async def pairs(engines: list[str], tiny_model: Path) -> AsyncIterator[Pairs]:
    """pairs(section={...}): a fleet of two engines that prefill and two that decode, and where they meet."""
    async with contextlib.AsyncExitStack() as stack:
        rooms = Rooms()
        urls = await open_gates(stack, engines, ("prefill", "prefill", "decode", "decode"), rooms)

        def make(**changes: dict[str, Any]) -> tuple[Fleet, Rooms]:
            settings = {"kind": "external", "addresses": urls, "prefill": 2}
            changes["engines"] = {**settings, **changes.get("engines", {})}
            config = fleet_config(tiny_model, **changes)

            async def handle(index: int) -> ExternalEngine:
                return ExternalEngine(config, index)

            fleet = Fleet(config, handle)
            stack.push_async_callback(fleet.close)
            return fleet, rooms

        yield make


async def test_both_parts_give_what_one_engine_gives(pairs: Pairs, tiny_model: Path) -> None:
    fleet, rooms = pairs()
    dispatcher = await serving(fleet, tiny_model, 51)
    for found in await generate(dispatcher, 4, SHORT):
        expected = reference_logprobs(tiny_model, PROMPT, found.output_ids.tolist())
        assert found.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(found.output_ids) == SHORT["max_new_tokens"]
        assert found.weight_versions == [(0, 51)]
        assert found.engine_id in ("engine-2", "engine-3")
    assert dispatcher.retries == 0
    assert sorted(rooms.prefills.values()) == sorted(rooms.decodes.values()) == [2, 2]


async def test_a_group_is_prefilled_on_one_engine_and_decoded_on_all(pairs: Pairs, tiny_model: Path) -> None:
    fleet, rooms = pairs()
    dispatcher = await serving(fleet, tiny_model, 52)
    await generate(dispatcher, 8, SHORT, session="a group")
    assert list(rooms.prefills.values()) == [8]
    assert list(rooms.decodes.values()) == [4, 4]


async def test_a_cache_that_does_not_arrive_is_made_again(pairs: Pairs, tiny_model: Path) -> None:
    fleet, rooms = pairs(rollout={"progress_timeout_s": 0.5})
    dispatcher = await serving(fleet, tiny_model, 53)
    (expected,) = await generate(dispatcher, 1, SHORT)
    rooms.lost = 2
    assert [g.output_ids.tolist() for g in await generate(dispatcher, 6, SHORT)] == [
        expected.output_ids.tolist()
    ] * 6
    assert dispatcher.retries >= 2
    assert fleet.unconfirmed(53) == []
    assert fleet.restarts == 0  # all of them answer: none was stalled


@pytest.mark.slow
async def test_one_engine_waits_as_long_as_the_other_has_work(pairs: Pairs, tiny_model: Path) -> None:
    fleet, rooms = pairs(rollout={"progress_timeout_s": 1.0})  # a busy host answers within
    dispatcher = await serving(fleet, tiny_model, 54)
    for gate in rooms.gates:
        gate.slots = asyncio.Semaphore(1)
    found = await generate(dispatcher, 5, LONG)  # the last waits while its engine decodes two
    assert {len(g.output_ids) for g in found} == {LONG["max_new_tokens"]}
    assert dispatcher.retries == 0


@pytest.mark.parametrize("stale", [0, 2], ids=["prefill", "decode"])
async def test_neither_part_is_done_by_another_version(
    pairs: Pairs, tiny_model: Path, other_model: Path, stale: int
) -> None:
    fleet, _ = pairs(rollout={"attempts": 2})
    dispatcher = await serving(fleet, tiny_model, 55)
    for index in (stale, stale + 1):  # behind the fleet's back
        await fleet._clients[index].weights.update_from_disk(str(other_model), 99)
    with pytest.raises(EngineError, match="weight version 99, 55 is expected"):
        await generate(dispatcher, 1, SHORT)


async def test_a_lost_decoder_is_not_used_until_it_has_the_version_again(
    pairs: Pairs, tiny_model: Path
) -> None:
    fleet, rooms = pairs()
    recover = recovery(fleet, tiny_model)
    await recover(56)
    dispatcher = fleet.dispatcher(56, recover)
    decoder = fleet._clients[2]
    await decoder.weights.update_from_disk(str(tiny_model), 7)
    fleet.mark_suspect(decoder, SglangClient(decoder.url, "x").no_progress(1.0, paused=True))
    await generate(dispatcher, 4, SHORT)
    assert list(rooms.decodes.values()) == [4]
    await recover(56)
    await generate(dispatcher, 4, SHORT)
    assert sorted(rooms.decodes.values()) == [2, 6]
    assert dispatcher.retries == 0


async def test_an_engine_that_does_another_part_is_named(pairs: Pairs, tiny_model: Path) -> None:
    fleet, _ = pairs(engines={"prefill": 3})
    dispatcher = await serving(fleet, tiny_model, 57)
    with pytest.raises(EngineError, match=r"is to prefill \(engines.prefill\), but runs with .* decode"):
        await generate(dispatcher, 3, SHORT)


async def test_a_cancelled_request_ends_at_both_engines(pairs: Pairs, tiny_model: Path) -> None:
    fleet, _ = pairs()
    dispatcher = await serving(fleet, tiny_model, 58)
    running = asyncio.create_task(generate(dispatcher, 2, LONG))
    decoders = [fleet._clients[index] for index in (2, 3)]

    async def made() -> int:
        return sum([(await engine.server_info())["counters"]["tokens"] for engine in decoders])

    async def until(running: list[int]) -> None:
        for _ in range(6000):
            found = [(await engine.server_info())["load"]["running"] for engine in decoders]
            if found == running:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"the engines run {found}")

    before = await made()
    await until([1, 1])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until([0, 0])
    assert await made() - before < 2 * LONG["max_new_tokens"]  # they did not end by themselves
    assert [engine.in_flight for engine in fleet._clients.values()] == [0, 0, 0, 0]
