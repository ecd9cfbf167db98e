"""`rollout.session.tools`: a function or a server, and what is wrong with neither or both."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.config.reading.load import validate
from tests.core.config.test_rules import config, values


def problems(tool: Any) -> list[tuple[str, str]]:
    """Field and reason of each problem of a configuration with this tool."""
    given = values()
    given["rollout"]["session"] = {"tools": ["a:b", tool], "max_tokens": 100}
    _, found = validate(given)
    return [(problem.field, problem.reason) for problem in found]


@pytest.mark.parametrize(
    "tool",
    [
        {"function": "a.b:c", "options": {"scale": 2}},
        {"mcp": {"command": ["server", "--stdio"], "env": {"API_KEY": "${env:KEY}"}, "only": ["add"]}},
        {"mcp": {"url": "https://host/mcp", "headers": {"Authorization": "${prefect:token}"}}},
    ],
)
def test_a_function_or_a_server_is_a_tool(tool: Any) -> None:
    assert problems(tool) == []


TOOL = "rollout.session.tools.1"
WRONG: list[tuple[Any, str, str]] = [
    ({"mcp": {}}, f"{TOOL}.mcp", "give either command or url"),
    ({"mcp": {"command": ["a"], "url": "http://a"}}, f"{TOOL}.mcp", "give either command or url"),
    ({"mcp": {"url": "a.b:c"}}, f"{TOOL}.mcp.url", "does not have the form"),
    ({"mcp": {"url": "http://a", "env": {"A": "b"}}}, f"{TOOL}.mcp", "env is for a command"),
    ({"mcp": {"command": ["a"], "headers": {"A": "b"}}}, f"{TOOL}.mcp", "headers are for a url"),
    ({"mcp": {"command": "server"}}, f"{TOOL}.mcp.command", "not a list"),
    ({"mcp": {"command": ["a"], "onyl": []}}, f"{TOOL}.mcp.onyl", "unknown key"),
    ({"mcp": {"command": ["a"]}, "name": "b"}, f"{TOOL}.name", "unknown key"),
    ({"function": "no path"}, f"{TOOL}.function", "does not have the form"),
    ({"options": {}}, f"{TOOL}.function", "missing"),
    ({"mcp": {"command": ["a"], "env": {"API_KEY": "sesame"}}}, f"{TOOL}.mcp.env.API_KEY", "is stored with"),
    (
        {"mcp": {"url": "https://a", "headers": {"Authorization": "sesame"}}},
        f"{TOOL}.mcp.headers.Authorization",
        "is stored with",
    ),
    ({"mcp": {"command": ["${env:PROGRAM}"]}}, f"{TOOL}.mcp.command.0", "references are replaced in"),
]


@pytest.mark.parametrize(("tool", "field", "reason"), WRONG)
def test_what_is_wrong_with_a_tool_is_named(tool: Any, field: str, reason: str) -> None:
    ((found, why),) = problems(tool)
    assert found == field
    assert reason in why


def test_a_sound_configuration_stays_one() -> None:
    assert config().rollout.session is None
