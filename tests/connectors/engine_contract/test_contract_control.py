"""What a client promises of an engine's control: abort, pause, flush, memory, state."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from millrace.core.errors import EngineError
from tests.support.contract import LONG, Contract
from tests.support.engine_process import EXACT


async def test_an_aborted_request_answers_with_what_it_has(on: Contract) -> None:
    mine, other = await on.begun("abort-mine", "keep-other", max_new_tokens=200)
    await on.client.abort("abort-mine")
    answer = await mine
    assert answer.finish == "abort"
    assert 0 < len(answer.output_ids) < 200
    assert on.is_of(on.engine.model, answer)
    assert (await other).finish == "length"


async def test_abort_ends_every_request_unless_it_names_one(on: Contract) -> None:
    running = await on.begun("one", "two", "three")
    await on.client.abort()
    assert {answer.finish for answer in await asyncio.gather(*running)} == {"abort"}


async def test_abort_goes_by_how_an_id_starts(on: Contract) -> None:
    running = await on.begun("s-0001~00", "s-0001~01")
    await on.client.abort("s-0001")
    assert {answer.finish for answer in await asyncio.gather(*running)} == {"abort"}


async def test_an_abort_of_an_unknown_request_is_no_error(on: Contract) -> None:
    await on.client.abort("nobody")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_keeps_requests_which_go_on_to_the_same_answer(
    on: Contract, mode: Literal["retract", "in_place"]
) -> None:
    params: dict[str, Any] = {"max_new_tokens": 200, "temperature": 0.0}
    alone = await on.ask(**params)
    (running,) = await on.begun(f"held-{mode}", **params)
    await on.client.pause(mode)
    assert await on.client.weight_version() is None
    await asyncio.sleep(0.2)
    assert not running.done()
    await on.client.resume()
    answer = await running
    assert answer.output_ids.tolist() == alone.output_ids.tolist() or not EXACT
    assert on.is_of(on.engine.model, answer)
    assert await on.client.weight_version() == on.engine.version


async def test_a_request_sent_while_paused_waits(on: Contract) -> None:
    await on.client.pause()
    waiting = asyncio.create_task(on.ask())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await on.client.resume()
    assert len((await waiting).output_ids) == 8


async def test_the_cache_is_flushed_only_while_nothing_runs(on: Contract) -> None:
    (running,) = await on.begun("busy")
    with pytest.raises(EngineError, match="requests|busy|flush"):
        await on.client.flush()
    await on.client.abort("busy")
    await running
    await on.idle()


@pytest.mark.embedded_only("SGLang's scheduler ends when it is told to release memory while requests run")
async def test_memory_is_not_released_while_requests_run(on: Contract) -> None:
    (running,) = await on.begun("holding")
    with pytest.raises(EngineError, match="release_memory"):
        await on.client.weights.release_memory(["kv_cache"])
    await on.client.abort("holding")
    await running


@pytest.mark.embedded_only("SGLang would compute in memory that is gone")
async def test_a_request_sent_while_memory_is_released_waits(on: Contract) -> None:
    before = await on.ask()
    await on.client.weights.release_memory(["kv_cache", "weights"])
    await on.client.weights.resume_memory(["weights"])
    waiting = asyncio.create_task(on.ask())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await on.client.weights.resume_memory(["kv_cache"])
    assert (await waiting).output_ids.tolist() == before.output_ids.tolist()


async def test_serving_goes_on_after_memory_was_released_and_weights_given_again(on: Contract) -> None:
    before = await on.ask()
    await on.idle()
    await on.client.forget_version()
    await on.client.weights.release_memory(["kv_cache", "weights"])
    assert await on.client.weight_version() is None
    await on.client.weights.resume_memory(["weights"])
    await on.client.weights.update_from_disk(str(on.engine.model), 27)
    await on.client.weights.resume_memory(["kv_cache"])
    after = await on.ask()
    assert after.output_ids.tolist() == before.output_ids.tolist() or not EXACT
    assert on.is_of(on.engine.model, after)
    assert after.weight_versions == [(0, 27)]


async def test_a_version_that_is_forgotten_is_reported_no_more(on: Contract) -> None:
    await on.client.forget_version()
    assert await on.client.weight_version() is None


async def test_an_engine_that_serves_is_healthy_and_generates(on: Contract) -> None:
    assert await on.client.health()
    assert await on.client.health(generating=True)


async def test_no_number_of_an_update_comes_again(on: Contract) -> None:
    numbers = [on.client.refit]
    for _ in range(3):
        on.client.note_refit()
        numbers.append(on.client.refit)
    other = Contract(on.engine).client
    assert numbers == sorted(set(numbers))
    assert other.refit not in numbers
    await other.close()


async def test_requests_in_flight_are_counted(on: Contract) -> None:
    running = await on.begun("one", "two", **{**LONG, "max_new_tokens": 1200})
    assert on.client.in_flight == 2
    await on.client.abort()
    await asyncio.gather(*running)
    assert on.client.in_flight == 0


async def test_an_engine_says_how_full_it_is(on: Contract) -> None:
    idle = await on.client.load()
    assert (idle.running, idle.waiting, idle.retracted) == (0, 0, 0)
    assert 0 <= idle.used < 0.5
    running = await on.begun("full-one", "full-two", max_new_tokens=200)
    full = await on.client.load()
    assert full.running + full.waiting == 2
    assert idle.used < full.used <= 1
    assert full.capacity == idle.capacity > 0
    await on.client.abort()
    await asyncio.gather(*running)
