"""What a user's function or server raises is stored, and shown to a policy: it holds a reference in place of each secret."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.workers.session_pool import SessionPool
from millrace.core.config import UserFunction
from millrace.core.config.data import Source
from millrace.core.config.rollout import Session
from millrace.core.contracts.rows.prompts import Quarantined
from millrace.core.errors import DataError
from millrace.core.sessions.interface import Task
from millrace.tasks.data.own_rows import OwnRows
from tests.support.secret_places import PLACES, path
from tests.support.session_driver import Driver, start

HERE = "tests.connectors.test_said_secrets"
SECRET = "pl4nted/of+the&function"
OPTIONS = {"key": "${env:SAID_KEY}"}
SERVER = """
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("complains")

@server.tool()
def complain() -> str:
    "Raise."
    raise KeyError(os.environ["SERVER_KEY"])

server.run()
"""


def said(key: str) -> str:
    return f"no access with {key}, https://host/?key={key} Authorization: Bearer {key}"


async def plays(session: Any, key: str) -> float:
    await session.generate()
    raise OSError(said(key))


async def calls(session: Any, key: str) -> float:
    await session.call("complain")
    return 1.0


class Environment:
    """Fails at its first step."""

    recovery = "restart"

    def __init__(self, key: str) -> None:
        self.key = key

    async def reset(self, task: Task) -> str:
        return "go"

    async def step(self, turn: Any) -> Any:
        raise OSError(said(self.key))

    async def close(self) -> None:
        pass


def complain(key: str) -> str:
    """Raise."""
    raise OSError(said(key))


class Rows:
    def __init__(self, key: str) -> None:
        self.key = key

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        if number == 1:
            raise OSError(said(self.key))
        return {"prompt": "1+1=", "label": {self.key: {1}}} if number == 2 else {"prompt": "1+1="}


def no_rows(key: str) -> Any:
    raise OSError(said(key))


def function(name: str) -> dict[str, Any]:
    return {"function": f"{HERE}:{name}", "options": OPTIONS}


def session_of(field: str, folder: Path) -> dict[str, Any]:
    """Settings whose field holds what fails."""
    if field.endswith("function.options"):
        return {"function": function("plays")}
    if field.endswith("named.0.options"):
        return {"function": function("calls"), "named": [{"name": "other", **function("plays")}]}
    if field.endswith("environment.options"):
        return {"environment": function("Environment")}
    if field.endswith("tools.0.options"):
        return {"function": function("calls"), "tools": [function("complain")]}
    (folder / "server.py").write_text(SERVER)
    mcp = {"command": [sys.executable, str(folder / "server.py")], "env": {"SERVER_KEY": OPTIONS["key"]}}
    return {"function": function("calls"), "tools": [{"mcp": mcp}]}


OF_SESSIONS = sorted({path(place) for place, _ in PLACES if path(place).startswith("rollout.session.")})
FAIL = [field for field in OF_SESSIONS if field.endswith((".options", ".mcp.env"))]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAID_KEY", SECRET)


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., SessionPool]]:
    made: list[SessionPool] = []

    def pool(**settings: Any) -> SessionPool:
        made.append(SessionPool(Session.model_validate({"timeout_s": 30, **settings})))
        return made[-1]

    yield pool
    for each in made:
        each.close()


@pytest.mark.parametrize("field", FAIL)
async def test_what_fails_in_a_rollout_names_its_reference(
    make: Callable[..., SessionPool], field: str, tmp_path: Path
) -> None:
    """Reasons of rollouts, and what tools said, held the secret in the stored rows."""
    pool, driver = make(**session_of(field, tmp_path)), Driver()
    end = await pool.run(start(metadata={"rollout": "other"} if ".named." in field else {}), driver.handle)
    everything = json.dumps([end, driver.asked])
    assert "no access with ${env:SAID_KEY}" in everything or "'${env:SAID_KEY}'" in everything, everything
    assert SECRET not in everything


def test_what_fails_in_rows_names_its_reference() -> None:
    def rows(name: str) -> OwnRows:
        return OwnRows(Source(name="a", rows=UserFunction.model_validate(function(name))))

    source = rows("Rows")
    try:
        good, raised, wrong = source.read(None, [0, 1, 2])
    finally:
        source.close()
    assert not isinstance(good, Quarantined)
    assert isinstance(raised, Quarantined)
    assert isinstance(wrong, Quarantined)
    assert "no access with ${env:SAID_KEY}" in raised.reason
    assert SECRET not in raised.reason + wrong.reason
    with pytest.raises(DataError, match=r"no access with \$\{env:SAID_KEY\}") as caught:
        asyncio.run(asyncio.to_thread(rows, "no_rows"))
    assert SECRET not in str(caught.value)
