"""What endpoints of SGLang's protocol answer that no EngineClient asks: information, loads, a client that leaves."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.engine_control import LONG, PROMPT, begun, idle


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


async def test_a_pause_that_aborts_ends_requests(http: Any) -> None:
    (running,) = await begun(http, "ended")
    await http.post("/pause_generation", {"mode": "abort"})
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
