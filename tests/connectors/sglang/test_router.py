"""A real sglang-router in front of real engines: what the dispatcher promises holds whoever chooses the engine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.engines.sglang.client import SESSION
from millrace.connectors.engines.sglang.router import PASSED, RunRouter
from millrace.core.errors import EngineError
from tests.support.fleets import LONG, SHORT, assert_idle, generate, serving, until_generating
from tests.support.local_handle import LocalHandle, LocalRouterHandle, fleet_config
from tests.support.slow_members import slow_but

pytest.importorskip("sglang_router")

MakeFleet = Callable[..., Fleet]
ROUND_ROBIN = {"engines": {"router": {"policy": "round_robin"}}}
SEEDED = {"max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 2**31 - 1, "ignore_eos": True}


async def tokens(dispatcher: Dispatcher) -> dict[str, int]:
    """Tokens that each serving engine has made since it was started."""
    counters = {e.engine_id: (await e.server_info())["counters"] for e in dispatcher._engines()}
    return {engine: found["tokens"] for engine, found in counters.items()}


async def made_by(dispatcher: Dispatcher, count: int, params: dict[str, Any], **more: Any) -> list[float]:
    """How many of `count` samples each engine made."""
    before = await tokens(dispatcher)
    await generate(dispatcher, count, params, **more)
    after = await tokens(dispatcher)
    return sorted((after[engine] - before[engine]) / params["max_new_tokens"] for engine in after)


@pytest.mark.parametrize(
    "policy", slow_but(["random", "round_robin", "cache_aware", "power_of_two", "manual"], "cache_aware")
)
async def test_a_seed_gives_the_tokens_that_the_own_dispatcher_gets(
    make_fleet: MakeFleet, tiny_model: Path, policy: str
) -> None:
    own = await serving(make_fleet(), tiny_model, 31)
    (expected,) = await generate(own, 1, SEEDED)
    routed = await serving(make_fleet(engines={"router": {"policy": policy}}), tiny_model, 31)
    for found in await generate(routed, 8, SEEDED, session="group"):
        assert found.output_ids.tolist() == expected.output_ids.tolist()
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert found.weight_versions == [(0, 31)]
        assert (found.text, found.finish) == (expected.text, "length")
    assert routed.retries == 0


async def test_the_policy_chooses_the_engine(make_fleet: MakeFleet, tiny_model: Path) -> None:
    for policy, more, expected in (
        ("round_robin", {}, [8, 8]),
        ("cache_aware", {}, [0, 16]),
        ("manual", {"session": "a group"}, [0, 16]),
    ):
        dispatcher = await serving(make_fleet(engines={"router": {"policy": policy}}), tiny_model, 31)
        assert await made_by(dispatcher, 16, SEEDED, **more) == expected, policy


@pytest.mark.slow
async def test_a_killed_engines_requests_are_made_again_and_the_one_in_its_place_is_used(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet(**ROUND_ROBIN)
    dispatcher = await serving(fleet, tiny_model, 32)
    (undisturbed,) = await generate(dispatcher, 1, LONG)
    running = asyncio.create_task(generate(dispatcher, 8, LONG))
    await until_generating(dispatcher)
    before = handles[0].server.state()
    handles[0].signal(signal.SIGKILL)
    found = await running
    assert dispatcher.retries == 4
    assert all(g.output_ids.tolist() == undisturbed.output_ids.tolist() for g in found)
    assert {g.weight_versions[0] for g in found} == {(0, 32)}
    assert fleet.restarts == 1
    assert handles[0].server.state()["url"] != before["url"]
    assert await made_by(dispatcher, 8, SEEDED) == [4, 4]


async def test_a_rebuilt_engine_gets_nothing_before_it_has_the_version(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet(**ROUND_ROBIN)
    dispatcher = await serving(fleet, tiny_model, 33)
    await generate(dispatcher, 2, SHORT)
    handles[1].signal(signal.SIGKILL)
    handles[1].server._process.wait()
    await fleet.ensure(str(tiny_model))
    assert fleet.unconfirmed(33) == [1]
    await generate(dispatcher, 6, SHORT)
    assert dispatcher.retries == 0
    assert (await fleet._clients[1].server_info())["counters"]["tokens"] == 0


async def test_a_sample_of_another_version_is_never_returned(
    make_fleet: MakeFleet, tiny_model: Path, other_model: Path
) -> None:
    dispatcher = await serving(make_fleet(**ROUND_ROBIN, rollout={"attempts": 2}), tiny_model, 34)
    for engine in dispatcher._engines():  # behind the fleet's back
        await engine.weights.update_from_disk(str(other_model), 99)
    with pytest.raises(EngineError, match="weight version 99, 34 is expected"):
        await generate(dispatcher, 1, SHORT)


@pytest.mark.slow
async def test_a_killed_router_is_started_again_and_its_requests_are_made_again(
    make_fleet: MakeFleet, tiny_model: Path, routers: dict[str, LocalHandle]
) -> None:
    fleet = make_fleet(**ROUND_ROBIN)
    dispatcher = await serving(fleet, tiny_model, 35)
    (undisturbed,) = await generate(dispatcher, 1, LONG)
    running = asyncio.create_task(generate(dispatcher, 4, LONG))
    await until_generating(dispatcher)
    (router,) = (handle for key, handle in routers.items() if "round_robin" in key)
    router.signal(signal.SIGKILL)
    assert [g.output_ids.tolist() for g in await running] == [undisturbed.output_ids.tolist()] * 4
    assert dispatcher.retries == 4
    assert fleet.restarts == 1
    assert await made_by(dispatcher, 8, SEEDED) == [4, 4]


async def test_another_driver_finds_the_router_that_runs(
    make_fleet: MakeFleet, tiny_model: Path, routers: dict[str, LocalHandle]
) -> None:
    await serving(make_fleet(**ROUND_ROBIN), tiny_model, 36)
    (router,) = (handle for key, handle in routers.items() if "round_robin" in key)
    pid = router.server.state()["pid"]
    second = make_fleet(**ROUND_ROBIN)
    dispatcher = await serving(second, tiny_model, 36)
    assert await made_by(dispatcher, 4, SEEDED) == [2, 2]
    assert router.server.state()["pid"] == pid
    assert second.restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("which", ["router", pytest.param("engine", marks=pytest.mark.slow)])
async def test_one_that_makes_no_progress_is_replaced_and_its_requests_made_again(
    make_fleet: MakeFleet,
    tiny_model: Path,
    handles: list[LocalHandle],
    routers: dict[str, LocalHandle],
    which: str,
) -> None:
    fleet = make_fleet(**ROUND_ROBIN, rollout={"progress_timeout_s": 2.0})
    dispatcher = await serving(fleet, tiny_model, 37)
    running = asyncio.create_task(generate(dispatcher, 4, LONG))
    await until_generating(dispatcher)
    (router,) = (handle for key, handle in routers.items() if "round_robin" in key)
    (router if which == "router" else handles[1]).signal(signal.SIGSTOP)
    assert {(len(g.output_ids), g.weight_versions[0]) for g in await running} == {
        (LONG["max_new_tokens"], (0, 37))
    }
    assert fleet.restarts >= 1
    assert fleet.unconfirmed(37) == []


async def test_an_engine_that_stays_paused_is_told_to_go_on_not_killed(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    fleet = make_fleet(**ROUND_ROBIN, rollout={"progress_timeout_s": 1.0})
    dispatcher = await serving(fleet, tiny_model, 38)
    await dispatcher._engines()[0].pause("in_place")
    found = await generate(dispatcher, 4, SHORT)
    assert {g.weight_versions[0][1] for g in found} == {38}
    assert fleet.restarts == 0
    assert fleet.unconfirmed(38) == []


@pytest.mark.slow
async def test_an_engine_that_is_idle_is_not_taken_for_stalled(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    fleet = make_fleet(engines={"router": {"policy": "manual"}}, rollout={"progress_timeout_s": 0.6})
    dispatcher = await serving(fleet, tiny_model, 39)
    await generate(dispatcher, 2, LONG, session="all on one")
    assert (dispatcher.retries, fleet.restarts) == (0, 0)


async def test_what_the_router_would_drop_is_refused(make_fleet: MakeFleet, tiny_model: Path) -> None:
    dispatcher = await serving(make_fleet(**ROUND_ROBIN), tiny_model, 40)
    with pytest.raises(EngineError, match="drops sampling_params.logit_bias; leave engines.router out"):
        await generate(dispatcher, 1, {**SHORT, "logit_bias": {"1": 2.0}})
    with pytest.raises(EngineError, match="temperature"):  # the engine's own refusal comes through
        await generate(dispatcher, 1, {**SHORT, "temperature": -1.0})
    assert dispatcher.retries == 0


async def test_a_cancelled_request_ends_at_the_engine(make_fleet: MakeFleet, tiny_model: Path) -> None:
    dispatcher = await serving(make_fleet(**ROUND_ROBIN), tiny_model, 41)
    running = asyncio.create_task(generate(dispatcher, 2, LONG))
    await until_generating(dispatcher)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await assert_idle(dispatcher)


async def test_it_passes_what_is_said_and_drops_the_rest(tiny_model: Path) -> None:
    """Fails when another version of the router drops more, or less."""
    seen: list[tuple[dict[str, Any], str | None]] = []
    answer = b'{"text": "a", "meta_info": {"weight_versions": [], "more": [-0.12345678901234567, 1e-8]}}'

    async def worker(http: web.Request) -> web.Response:
        if http.path != "/generate":
            return web.json_response({"model_path": "m"})
        seen.append((await http.json(), http.headers.get(SESSION)))
        assert http.headers["Authorization"] == "Bearer the worker's"
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", worker)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    handle = LocalRouterHandle(fleet_config(tiny_model, engines={"router": {"policy": "manual"}}))

    async def find() -> LocalHandle:
        return handle

    router = RunRouter(find, print)
    try:
        await router.ensure({f"http://127.0.0.1:{runner.addresses[0][1]}": "the worker's"})
        url, key = handle.server.state()["url"], handle.server.state()["key"]
        top = {"input_ids": [1, 2**31 - 1], "rid": "r", "return_logprob": True, "logprob_start_len": -1}
        texts, lists = (
            dict.fromkeys(("json_schema", "regex", "ebnf"), "x"),
            {"stop": ["a"], "stop_token_ids": [7]},
        )
        flags = dict.fromkeys(("ignore_eos", "no_stop_trim", "skip_special_tokens"), True)
        numbers = dict.fromkeys(PASSED - texts.keys() - lists.keys() - flags.keys(), 1)
        params = {**texts, **lists, **flags, **numbers, "temperature": 0.123456, "sampling_seed": 2**63 - 1}
        dropped = {"logit_bias": {"1": 1.0}, "stop_regex": ["a"], "custom_params": {}, "structural_tag": "a"}
        async with aiohttp.ClientSession(headers={SESSION: "s", "Authorization": f"Bearer {key}"}) as http:
            body = {**top, "return_text_in_logprobs": False, "sampling_params": {**params, **dropped}}
            async with http.post(f"{url}/generate", json=body) as got:
                assert await got.read() == answer
            body["sampling_params"] = {"temperature": 0.123456789}
            await http.post(f"{url}/generate", json=body)
    finally:
        await router.close()
        handle.close()
        await runner.cleanup()
    (first, session), (second, _) = seen
    assert (first["sampling_params"], session) == (params, "s")
    assert {name: first[name] for name in top} == top
    assert second["sampling_params"]["temperature"] == 0.12345679  # hence the rule about six digits
