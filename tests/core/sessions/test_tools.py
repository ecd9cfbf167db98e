"""Functions as tools: what a model can be shown of one, whatever its parameters are called, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.config.rollout import Tool
from millrace.core.errors import ConfigError
from millrace.core.sessions.interface import ToolError
from millrace.core.sessions.tools import LoadedTool

HERE = "tests.support.odd_tools"
FIELD = "rollout.session.tools.0"


def loaded(name: str) -> LoadedTool:
    return LoadedTool(Tool(function=f"{HERE}:{name}"), FIELD)


REFUSED = {
    "undefined": "a type hint of it cannot be read: NameError: name 'Missing' is not defined",
    "own_class": "a type hint of it has no JSON form (x: <class 'tests.support.odd_tools.Thing'>)",
    "function": "a type hint of it has no JSON form (x: ",
    "by_place": "its parameter x can be given by its place alone",
    "no_hint": "its parameter x has no type hint",
    "no_docstring": "no_docstring has no docstring",
    "yields": "it is no function that returns an answer",
    "Called": "it is no function that returns an answer",
    "called": "it is no function that returns an answer",
    "nowhere": "tests.support.odd_tools has no function nowhere",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_model_can_be_shown_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(name)
    assert refused.value.reason.startswith(REFUSED[name])
    assert str(refused.value.where).startswith(f"{FIELD}.function")
    assert refused.value.remedy


async def test_a_parameter_may_have_any_name() -> None:
    tool = loaded("names")
    shown = tool.schema["function"]["parameters"]
    assert list(shown["properties"]) == ["self", "tool", "model_config", "schema", "_hidden"]
    assert shown["required"] == ["self", "tool", "model_config", "schema"]
    given = {"self": 1, "tool": "a", "model_config": 2, "schema": "b"}
    assert await tool(given) == "1 a 2 b True"
    assert await tool({**given, "_hidden": False}) == "1 a 2 b False"


async def test_arguments_are_of_the_types_that_the_function_wants() -> None:
    tool = loaded("kinds")
    assert await tool({"point": {"x": 1}, "many": ["2", 3]}) == "1 a [2, 3] True"
    wrong: dict[str, dict[str, Any]] = {
        "point.x": {"point": {"x": "one"}},
        "kind": {"point": {"x": 1}, "kind": "c"},
        "more": {"point": {"x": 1}, "more": 1},
        "point": {},
    }
    for place, arguments in wrong.items():
        with pytest.raises(ToolError, match=f"kinds does not take these arguments: {place}: "):
            await tool(arguments)
