"""What a user's function or server raises is stored, and shown to a policy: it holds a reference in place of each secret."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from millrace.connectors.user_code.mcp_tools import server_schemas
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config import RunConfig, UserFunction
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.data import Source
from millrace.core.config.filter import Filter
from millrace.core.config.rollout import McpServer, SessionSection
from millrace.core.config.secret_rules import is_replaced
from millrace.core.contracts.rows.prompts import Quarantined
from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.group_filters import GroupSample, judge_group
from millrace.core.hooks.loading import call_function
from millrace.core.hooks.reward_selection import Selected
from millrace.core.sessions.interface import Task
from millrace.tasks.data.own_rows import OwnRows
from millrace.tasks.runtime.scoring import Scoring
from tests.support.loopback import listening
from tests.support.secret_places import PLACES, path
from tests.support.session_driver import Driver, start
from tests.support.slow_members import slow_but

HERE = "tests.tasks.test_said_secrets"
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


def refuses(*_: object, key: str) -> float:
    raise OSError(said(key))


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


FIELDS = sorted({path(place) for place, _ in PLACES if is_replaced(path(place))})
OF_SESSIONS = sorted({path(place) for place, _ in PLACES if path(place).startswith("rollout.session.")})
SCORED = (  # by worker processes, whose reasons are stored with their samples
    *("reward.options", "reward.named.0.options", "data.sources.0.reward.options"),
    *("evaluation.sets.0.reward.options", "algorithm.teacher_server.hint.options"),
)
CALLED = (  # by whoever needs the answer, which stops with the message
    *("run.prepare.options", "rollout.buffer.buffer_filter.options", "algorithm.shaping.options"),
    *("algorithm.advantage.options", "algorithm.loss.options"),
)
ELSEWHERE = {
    "data.sources.0.rows.options": "test_what_fails_in_rows_names_its_reference",
    "filter.group_filter.options": "test_what_a_group_filter_raises_names_its_reference",
    # of servers: what refuses them is no code of the user's
    "engines.key": "tests/flows/test_planted_secrets.py",
    "algorithm.teacher_server.key": "tests/flows/test_planted_secrets.py",
    "rollout.session.tools.0.mcp.headers": "test_what_an_mcp_server_refuses_names_no_secret_of_its_headers",
}
FAIL = [field for field in OF_SESSIONS if field.endswith((".options", ".mcp.env"))]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAID_KEY", SECRET)


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., SessionPool]]:
    made: list[SessionPool] = []

    def pool(**settings: Any) -> SessionPool:
        made.append(SessionPool(SessionSection.model_validate({"timeout_s": 30, **settings})))
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
    everything = repr([end, driver.asked])
    assert "no access with ${env:SAID_KEY}" in everything or "'${env:SAID_KEY}'" in everything, everything
    assert SECRET not in everything


def test_every_field_that_takes_a_reference_has_a_row() -> None:
    assert {*FAIL, *SCORED, *CALLED, *ELSEWHERE} == set(FIELDS)


def selected(config: RunConfig, scoring: Scoring, field: str) -> tuple[Selected | None, str]:
    """The reward that a source or set has of its own, and the row's metadata."""
    if ".named." in field:
        return None, '{"reward": "other"}'
    own = {"data": scoring.of_sources.get("sums"), "evaluation": scoring.of_sets.get("easy")}
    return own.get(field.partition(".")[0]), "null"


@pytest.mark.parametrize("concurrency", slow_but([1, 4], 4))
@pytest.mark.parametrize("fields", [SCORED[:1], SCORED[1:]], ids=["reward.options", "others"])
async def test_what_fails_in_scoring_names_its_reference(
    make_config: Callable[..., RunConfig], fields: tuple[str, ...], concurrency: int
) -> None:
    """The run's own reward, and those that another one stands beside: of one run, in one process."""
    fails, passes = function("refuses"), {"function": "millrace.core.rewards.text:contains"}
    config = make_config(
        reward={
            **(fails if "reward.options" in fields else passes),
            "concurrency": concurrency,
            "workers": 1,
            "named": [{"name": "other", **fails}],
        },
        data={"sources": [{"name": "sums", "path": "train.jsonl", "reward": fails}]},
        evaluation={"sets": [{"name": "easy", "path": "held_out.jsonl", "reward": fails}]},
    )
    scoring = Scoring(config)
    try:
        for field in fields:
            own, metadata = selected(config, scoring, field)
            row: Any = {
                "prompt": '"a"',
                "response": "b",
                "label": None,
                "metadata": metadata if ".named." in field else None,
                "response_length": 1,
                "status": "completed",
                "dialogue": None,
            }
            if "hint" in field:
                hint = UserFunction.model_validate(fails)
                outcome = await scoring.hint(hint, "algorithm.teacher_server.hint", row)
            else:
                outcome = await scoring.score(scoring.selected(row, own), row)
            assert outcome.kind == "failed", field
            assert "no access with ${env:SAID_KEY}" in (outcome.reason or ""), field
            assert SECRET not in (outcome.reason or "")
    finally:
        scoring.close()


@pytest.mark.parametrize("field", CALLED)
def test_what_a_called_function_raises_names_its_reference(field: str) -> None:
    with pytest.raises(ConfigError, match=r"no access with \$\{env:SAID_KEY\}") as caught:
        call_function(UserFunction.model_validate(function("refuses")), field.removesuffix(".options"))
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown


async def test_what_an_mcp_server_refuses_names_no_secret_of_its_headers() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401, text=f"not with {request.headers['Authorization']}")

    async with listening(refuse, "/mcp") as address:
        settings = McpServer(url=f"{address}/mcp", headers={"Authorization": f"Bearer {OPTIONS['key']}"})
        with pytest.raises(ConfigError) as caught:
            await asyncio.to_thread(server_schemas, settings, "rollout.session.tools.0.mcp")
    assert SECRET not in str(caught.value)


def test_what_a_group_filter_raises_names_its_reference() -> None:
    settings = Filter.model_validate({"group_filter": function("refuses")})
    sample = GroupSample("a", 1.0, "scored")
    judgement = judge_group([sample, sample], settings, Algorithm())
    assert "no access with ${env:SAID_KEY}" in (judgement.reason or "")
    assert SECRET not in (judgement.reason or "")


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
