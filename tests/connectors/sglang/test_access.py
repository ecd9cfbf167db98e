"""Who gets an answer from what a run starts: a scan of every endpoint as another user and as a web page would make it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import aiohttp
import psutil
import pytest

from millrace.connectors.engines.embedded.access import Access
from millrace.connectors.engines.embedded.server import Server
from tests.support.local_handle import LocalHandle, LocalRouterHandle, fleet_config

ROUTES = sorted(
    {
        (route.method, route.resource.canonical)
        for route in Server(cast(Any, None), {"model_path": "model"}, Access("key")).app().router.routes()
        if route.resource and route.method != "HEAD"
    }
)
JSON, TEXT = {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}
BODY = b'{"action": "reset_tensors"}'


async def status(url: str, verb: str, path: str, headers: dict[str, str]) -> int:
    async with aiohttp.ClientSession(headers=headers) as http:
        data = BODY if verb == "POST" else None
        async with http.request(verb, url + path, data=data) as answer:
            await answer.read()
            return answer.status


def key_of(handle: LocalHandle | LocalRouterHandle) -> dict[str, str]:
    return {"Authorization": f"Bearer {handle.server.state()['key']}"}


@pytest.fixture
async def engine(handles: list[LocalHandle], tiny_model: Path) -> str:
    state = await handles[0].start(str(tiny_model))
    assert state["url"]
    return state["url"]


async def test_a_started_engine_answers_nobody_without_its_key(
    engine: str, handles: list[LocalHandle]
) -> None:
    own = key_of(handles[0])
    before = await weights(engine, own)
    assert len(ROUTES) > 20
    for verb, path in [*ROUTES, ("GET", "/nothing"), ("POST", "/health")]:
        for without in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic x"},
            key_of(handles[1]),
        ):
            expected = {("GET", "/health"): 200, ("POST", "/health"): 405}.get((verb, path), 401)
            assert await status(engine, verb, path, {**JSON, **without}) == expected, (verb, path, without)
        foreign = {**JSON, **own, "Origin": "https://example.org"}
        assert await status(engine, verb, path, foreign) == 403, path
        assert await status(engine, verb, path, {**JSON, **own, "Host": "example.org"}) == 403, path
        if verb == "POST":
            assert await status(engine, verb, path, {**TEXT, **own}) == 415, path
    preflight = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert await status(engine, "OPTIONS", "/generate", preflight) == 403
    assert await weights(engine, own) == before


async def weights(url: str, headers: dict[str, str]) -> Any:
    body = {"action": "checksum"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(url + "/weights_checker", json=body) as got,
    ):
        assert got.status == 200
        return await got.json()


async def test_with_its_key_it_answers_under_every_name_of_this_machine(
    engine: str, handles: list[LocalHandle]
) -> None:
    for host in ("localhost:1", "127.0.0.1", "10.1.2.3:30000", "[::1]:30000"):
        assert await status(engine, "GET", "/server_info", {**key_of(handles[0]), "Host": host}) == 200


async def test_no_command_line_shows_a_key(engine: str, handles: list[LocalHandle]) -> None:
    key = handles[0].server.state()["key"]
    assert key
    assert key != handles[1].server.state()["key"]
    process = psutil.Process(handles[0].server.state()["pid"])
    lines = [process.cmdline(), *(child.cmdline() for child in process.children(recursive=True))]
    assert not [line for line in lines if key in " ".join(line)]
    assert handles[0].server.log.stat().st_mode & 0o77 == 0


async def test_a_router_passes_nothing_on_without_its_own_key(
    engine: str, handles: list[LocalHandle], tiny_model: Path
) -> None:
    pytest.importorskip("sglang_router")
    router = LocalRouterHandle(fleet_config(tiny_model, engines={"router": {"policy": "round_robin"}}))
    try:
        state = await router.start()
        url, pid = state["url"], state["pid"]
        assert url
        worker = {"url": engine, "api_key": handles[0].server.state()["key"]}
        async with aiohttp.ClientSession(headers=key_of(router)) as http:
            async with http.post(url + "/workers", json=worker) as answer:
                assert answer.status == 202
            async with asyncio.timeout(20):
                while True:
                    async with http.get(url + "/workers") as answer:
                        if [w for w in (await answer.json())["workers"] if w["is_healthy"]]:
                            break
                    await asyncio.sleep(0.05)
        asked = [("POST", "/generate"), ("GET", "/workers"), ("POST", "/workers"), ("POST", "/flush_cache")]
        for verb, path in asked:
            for without in ({}, key_of(handles[0])):
                assert await status(url, verb, path, {**JSON, **without}) == 401, path
        for path in ("/get_model_info", "/model_info", "/server_info"):
            assert await status(url, "GET", path, {}) in (401, 404), path
        listening = [c for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
        assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
        assert (state["key"] or "") not in " ".join(psutil.Process(pid).cmdline())
    finally:
        router.close()
