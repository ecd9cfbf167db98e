"""What an engine's control endpoints promise: abort, pause, flush, memory, information."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.engine_control import LONG, PROMPT, SHORT, begun, idle, is_of, load
from tests.support.engine_process import CLOSE, EXACT, reference_logprobs


async def test_an_aborted_request_answers_with_what_it_has(http: Any) -> None:
    mine, other = await begun(http, "abort-mine", "keep-other", max_new_tokens=400)
    await http.post("/abort_request", {"rid": "abort-mine"})
    answer = await mine
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 400
    pairs = answer["meta_info"]["output_token_logprobs"]
    expected = reference_logprobs(http.model, PROMPT, answer["output_ids"])
    assert [value for value, _, _ in pairs] == pytest.approx(expected, abs=CLOSE)
    assert (await other)["meta_info"]["finish_reason"]["type"] == "length"


async def test_abort_all_ends_every_request(http: Any) -> None:
    running = await begun(http, "one", "two", "three")
    await http.post("/abort_request", {"abort_all": True})
    answers = await asyncio.gather(*running)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}


async def test_an_abort_of_an_unknown_request_is_no_error(http: Any) -> None:
    await http.post("/abort_request", {"rid": "nobody"})


async def test_a_pause_that_retracts_goes_on_to_the_same_answer(http: Any) -> None:
    params = {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}
    alone = await http.generate(PROMPT, **params)
    (running,) = await begun(http, "retracted", **params)
    await http.post("/pause_generation", {"mode": "retract"})
    await asyncio.sleep(0.2)
    assert not running.done()
    await http.post("/continue_generation")
    answer = await running
    pairs = answer["meta_info"]["output_token_logprobs"]
    expected = reference_logprobs(http.model, PROMPT, answer["output_ids"])
    assert [value for value, _, _ in pairs] == pytest.approx(expected, abs=CLOSE)
    assert answer["output_ids"] == alone["output_ids"] or not EXACT


async def test_a_pause_in_place_keeps_requests(http: Any) -> None:
    (running,) = await begun(http, "held", max_new_tokens=300)
    await http.post("/pause_generation", {"mode": "in_place"})
    await asyncio.sleep(0.2)
    assert not running.done()
    await http.post("/continue_generation")
    assert (await running)["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_pause_that_aborts_ends_requests(http: Any) -> None:
    (running,) = await begun(http, "ended")
    await http.post("/pause_generation", {"mode": "abort"})
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_request_sent_while_paused_waits(http: Any) -> None:
    await http.post("/pause_generation", {"mode": "retract"})
    waiting = asyncio.create_task(http.generate(PROMPT, **SHORT))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await http.post("/continue_generation")
    assert len((await waiting)["output_ids"]) == 8


async def test_the_cache_is_flushed_only_while_nothing_runs(http: Any) -> None:
    (running,) = await begun(http, "busy")
    await http.post("/flush_cache", status=400)
    await http.post("/abort_request", {"rid": "busy"})
    await running
    await http.post("/flush_cache")


@pytest.mark.embedded_only("SGLang's scheduler ends when it is told to release memory while requests run")
async def test_memory_is_not_released_while_requests_run(http: Any) -> None:
    (running,) = await begun(http, "holding")
    await http.post("/release_memory_occupation", {"tags": ["kv_cache"]}, status=400)
    await http.post("/abort_request", {"rid": "holding"})
    await running


@pytest.mark.embedded_only("SGLang would compute in memory that is gone")
async def test_a_request_sent_while_memory_is_released_waits(http: Any) -> None:
    before = await http.generate(PROMPT, **SHORT)
    await http.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    await http.post("/resume_memory_occupation", {"tags": ["weights"]})
    waiting = asyncio.create_task(http.generate(PROMPT, **SHORT))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await http.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert (await waiting)["output_ids"] == before["output_ids"]


async def test_serving_goes_on_after_memory_was_released_and_given_weights_again(
    http: Any, restored: None
) -> None:
    before = await http.generate(PROMPT, **SHORT)
    await idle(http)
    await http.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    await http.post("/resume_memory_occupation", {"tags": ["weights"]})
    await load(http, http.model, "27")
    await http.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    after = await http.generate(PROMPT, **SHORT)
    assert after["output_ids"] == before["output_ids"] or not EXACT
    assert is_of(http.model, after)
    assert after["meta_info"]["weight_version"] == "27"


async def test_health_and_information_are_served(http: Any) -> None:
    await http.get("/health")
    await http.get("/health_generate")
    assert (await http.get("/server_info"))["model_path"]
    info = await http.get("/model_info")
    assert info["model_path"]
    assert info["weight_version"]


async def test_a_client_that_leaves_takes_only_its_own_request_along(http: Any) -> None:
    stays = (
        "leaver-2" if http.own else "stayer"
    )  # SGLang ends all whose rid begins with that of the one that left
    (other,) = await begun(http, stays, max_new_tokens=600)
    (leaving,) = await begun(http, "leaver")
    plain = asyncio.create_task(http.generate(PROMPT, **LONG, top={"rid": "leave"}))
    await asyncio.sleep(0.1)
    leaving.cancel()
    plain.cancel()
    assert (await other)["meta_info"]["finish_reason"]["type"] == "length"
    if not http.own:  # it looks for a client that left every few seconds
        return await idle(http)
    for _ in range(20):
        if not (await http.get("/server_info"))["load"]["running"]:
            return None
        await asyncio.sleep(0.02)
    raise AssertionError("the requests of a client that left still run")


async def test_loads_tell_what_runs_and_what_it_holds(http: Any) -> None:
    running = await begun(http, "first", "second", max_new_tokens=1500)
    held = await _load_with(http, running=2)
    assert held["num_used_tokens"] > len(PROMPT)
    await http.post("/abort_request", {"abort_all": True})
    await asyncio.gather(*running)
    assert (await _load_with(http, running=0))["num_waiting_reqs"] == 0


async def _load_with(http: Any, running: int) -> Any:
    """What the engine holds once so many requests run; SGLang tells it with each batch."""
    async with asyncio.timeout(60):
        while True:
            (held,) = (await http.get("/v1/loads?include=core"))["loads"]
            if held["num_running_reqs"] == running:
                return held
            await asyncio.sleep(0.05)
