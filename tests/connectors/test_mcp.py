"""MCP servers as tools, in processes that run rollouts: every way in which a server can misbehave is an answer for the policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from millrace.connectors.user_code.mcp_server import McpConnection
from millrace.connectors.user_code.mcp_tools import tool_schemas
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config.rollout import McpTools, SessionSection
from millrace.core.errors import ConfigError
from millrace.flows.preflight.check_model import ReadModel
from millrace.flows.preflight.check_session import check_session
from tests.support.session_driver import Driver, start

SERVER = [sys.executable, str(Path(__file__).parents[1] / "support" / "mcp_server.py")]
TIMEOUT_S = 15.0


def settings(*tools: Any, **changed: Any) -> SessionSection:
    function = {"function": "tests.support.session_functions:calls_in_order"}
    return SessionSection.model_validate(
        {"timeout_s": TIMEOUT_S, "tools": tools, "function": function, **changed}
    )


def started(**options: Any) -> dict[str, Any]:
    return {"mcp": {"command": SERVER, **options}}


@pytest.fixture
async def pool() -> AsyncIterator[Any]:
    made: list[SessionPool] = []

    def make(*tools: Any, **changed: Any) -> SessionPool:
        made.append(SessionPool(settings(*tools, **changed)))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def answers(pool: SessionPool, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """What a rollout that makes these calls is answered."""
    driver = Driver()
    end = await pool.run(start(metadata={"calls": calls}), driver.handle)
    assert end.status == "completed", end
    return driver.answers


async def test_a_servers_tools_are_called_beside_functions(pool: Any) -> None:
    made = pool(started(), {"function": "tests.support.session_functions:add", "name": "add_here"})
    found = await answers(made, ("add", {"a": 1, "b": 2}), ("add_here", {"a": 3, "b": 4}))
    assert found == ["3", "7"]


async def test_what_a_server_says_is_wrong_is_an_answer(pool: Any) -> None:
    found = await answers(pool(started()), ("fail", {}), ("add", {"a": "one", "b": 2}), ("gone", {}))
    assert found[0].startswith("fail failed: ")
    assert "missing" in found[0]
    assert found[1].startswith("add failed: ")
    assert found[2].startswith("there is no tool gone; there are add, die, fail, wait, whoami")


@pytest.mark.slow
async def test_a_call_without_answer_ends_alone(pool: Any) -> None:
    made = pool(started(), workers=1)
    before, late, after = await answers(made, ("whoami", {}), ("wait", {"seconds": 600}), ("whoami", {}))
    assert late == "wait gave no answer within 15 s"
    assert before == after


async def test_a_server_that_dies_fails_its_call_and_is_started_again(pool: Any) -> None:
    made = pool(started(), workers=1)
    before, died, after = await answers(made, ("whoami", {}), ("die", {}), ("whoami", {}))
    assert died.startswith("die failed: ")
    assert before.split()[0] != after.split()[0]


@pytest.mark.slow
async def test_a_server_that_died_between_calls_is_started_again(pool: Any) -> None:
    made = pool(started(), workers=1)
    (before,) = await answers(made, ("whoami", {}))
    os.kill(int(before.split()[0]), 9)
    # the first of these may be made before its death is noticed
    _, after = await answers(made, ("whoami", {}), ("whoami", {}))
    assert int(after.split()[0]) != int(before.split()[0])


@pytest.mark.slow
async def test_calls_of_many_rollouts_are_made_side_by_side(pool: Any) -> None:
    made = pool(started(), workers=1)
    await answers(made, ("add", {"a": 1, "b": 1}))
    began = time.monotonic()
    await asyncio.gather(*(answers(made, ("wait", {"seconds": 1.0})) for _ in range(32)))
    assert time.monotonic() - began < 16


async def test_a_server_ends_with_its_process_of_rollouts(pool: Any) -> None:
    made = pool(started(), workers=1)
    (said,) = await answers(made, ("whoami", {}))
    made.close()
    for _ in range(100):
        if not Path(f"/proc/{said.split()[0]}").exists():
            return
        await asyncio.sleep(0.1)
    pytest.fail("it runs on")


async def test_secrets_are_referred_to(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_OURS", "open sesame")
    made = pool(started(env={"SERVER_SECRET": "${env:A_SECRET_OF_OURS}"}))
    (said,) = await answers(made, ("whoami", {}))
    assert said.endswith(" open sesame")


@contextlib.contextmanager
def served(port: int) -> Iterator[str]:
    process = subprocess.Popen([*SERVER, "http", str(port)])
    try:
        for _ in range(300):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


async def test_a_server_at_a_url_is_called_and_found_again_when_it_was_away(pool: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    with served(port) as address:
        made = pool({"mcp": {"url": address, "headers": {"x-from": "tests"}}})
        add = ("add", {"a": 1, "b": 2})
        found = await answers(made, add, ("fail", {}), ("die", {}), add)
    assert found[0] == "3"
    assert [text.partition(" failed: ")[0] for text in found[1:]] == ["fail", "die", "add"]
    with served(port):
        assert await answers(made, add) == ["3"]


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_a_redirect_to_another_address_gets_no_header(elsewhere: bool) -> None:
    """A server that redirects had its headers, with a secret in them, sent on to wherever it said."""
    heard: list[tuple[str, str | None]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        heard.append((request.path, request.headers.get("x-secret")))
        if request.path == "/mcp":
            host = f"http://localhost:{request.url.port}" if elsewhere else ""
            return web.Response(status=307, headers={"Location": f"{host}/other"})
        return web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
        settings = McpTools.model_validate({"mcp": {"url": url, "headers": {"x-secret": "a name"}}}).mcp
        with pytest.raises(ConfigError) as raised:
            await McpConnection(settings, "field").schemas()
    finally:
        await runner.cleanup()
    assert ("/mcp", "a name") in heard
    assert (("/other", "a name") in heard) == (not elsewhere)
    assert ("it redirects to another address, http://localhost" in str(raised.value)) == elsewhere


@pytest.mark.slow
async def test_calls_under_way_when_their_server_dies_are_answered(pool: Any) -> None:
    made = pool(started(), workers=1)
    await answers(made, ("whoami", {}))
    waiting = [asyncio.ensure_future(answers(made, ("wait", {"seconds": 600}))) for _ in range(4)]
    await asyncio.sleep(1)
    await answers(made, ("die", {}))
    found = [text for each in await asyncio.gather(*waiting) for text in each]
    assert all(text.startswith("wait failed: ") for text in found), found
    assert len(await answers(made, ("whoami", {}), ("add", {"a": 2, "b": 2}))) == 2


def test_check_lists_a_servers_tools_and_names_what_is_wrong() -> None:
    model = ReadModel()
    given = settings(started(only=["add"]), {"mcp": {"command": ["no-such-program"]}}, history="append")
    (problem,) = check_session(given, model)
    assert names(model.tools) == ["add"]
    assert (problem.field, problem.value) == ("rollout.session.tools.1.mcp", "no-such-program")


def schemas(*tools: Any) -> list[dict[str, Any]]:
    return tool_schemas(settings(*tools).tools)


def names(found: Sequence[dict[str, Any]]) -> list[str]:
    return [schema["function"]["name"] for schema in found]


def test_the_model_is_shown_a_servers_schemas() -> None:
    found = schemas("tests.support.session_functions:count", started(only=["add"]))
    assert names(found) == ["count", "add"]
    function = found[1]["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["required"] == ["a", "b"]
    assert json.dumps(found)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([started(only=["sub"])], "tools.0.mcp.only: the server has no tool sub; it has add, "),
        ([started(), "tests.support.session_functions:add"], "tools.1: another tool is called add too"),
        ([{"mcp": {"command": ["no-such-program"]}}], "there is no program no-such-program"),
        ([{"mcp": {"command": ["false"]}}], "tools.0.mcp: the MCP server gives no list of tools"),
        ([{"mcp": {"url": "http://127.0.0.1:9/mcp"}}], "tools.0.mcp: the MCP server gives no list of tools"),
        ([started(env={"A": "${env:NOT_SET_HERE}"})], "refers to NOT_SET_HERE, which is not set"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(tools: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        schemas(*tools)
