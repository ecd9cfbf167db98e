"""Tools: how a function is described to a model, and how it is called.

A tool is a function, sync or async, with type hints and a docstring whose first paragraph says what it does and whose `Args:`
name its parameters, as transformers and the Model Context Protocol have it.
"""

import asyncio
import inspect
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from pydantic import ConfigDict, Field, PydanticUserError, ValidationError, create_model

from millrace.core.config.rollout import AnyTool, Tool
from millrace.core.contracts.rows.messages import text_of_answer
from millrace.core.errors import ConfigError
from millrace.core.hooks.loading import failure_of, load_function
from millrace.core.plain_text import json_text, whole
from millrace.core.sessions.interface import ToolError

_STRICT = ConfigDict(extra="forbid")


class NamedCall(Protocol):
    """A callable tool: a function, or a tool of a server."""

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """The answer as text. Raises ToolError."""
        ...


class LoadedTool:
    """A tool's function, its schema and the options that it is always called with."""

    def __init__(self, tool: Tool, field: str) -> None:
        """Errors: ConfigError naming `field` if the function cannot be loaded or described to a model."""
        self._tool = tool
        self._call = load_function(tool, field)
        self.function = inspect.unwrap(getattr(self._call, "func", self._call))
        if (
            not inspect.isroutine(self.function)
            or inspect.isasyncgenfunction(self.function)
            or (inspect.isgeneratorfunction(self.function))
        ):
            raise ConfigError(
                "it is no function that returns an answer",
                where=f"{field}.function = {tool.function}",
                remedy="name a function, sync or async, without yield",
            )
        self.name = tool.name or self.function.__name__
        self._arguments = _arguments(self.function, tool, field)
        self.schema = _schema(self.name, self.function, self._arguments, field)

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """The answer as text. Raises ToolError for arguments that the function refuses, and for any error that it raises."""
        try:
            given = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "its arguments"
            raise ToolError(f"{self.name} does not take these arguments: {place}: {first['msg']}") from None
        names = type(given).model_fields
        values = {str(names[key].alias): getattr(given, key) for key in given.model_fields_set}
        try:
            if inspect.iscoroutinefunction(self.function):
                answer = await self._call(**values)
            else:
                answer = await asyncio.to_thread(self._in_thread, values)
        except Exception as error:  # noqa: BLE001 - a function of the user's may raise anything
            raise ToolError(f"{self.name} failed: {failure_of(error, self._tool)}") from error
        return as_text(answer)

    def _in_thread(self, values: Mapping[str, Any]) -> Any:
        """Make the call in this thread, which cannot be stopped."""
        place = object()
        unended.add(place)
        try:
            return self._call(**values)
        finally:
            unended.discard(place)


unended: set[object] = set()  # calls that still run in threads of this process


def load_tools(tools: Sequence[AnyTool]) -> dict[str, LoadedTool]:
    """The functions among the tools of a configuration, by name."""
    loaded = [
        LoadedTool(tool, f"rollout.session.tools.{at}")
        for at, tool in enumerate(tools)
        if isinstance(tool, Tool)
    ]
    return {tool.name: tool for tool in loaded}


def as_text(answer: Any) -> str:
    """A tool's answer as the model sees it: text unchanged, content parts as their text, other values as JSON."""
    parts = text_of_answer(answer)
    answer = answer if parts is None else parts
    if isinstance(answer, str):
        return whole(answer)
    try:
        return json_text(answer, default=str)
    except (TypeError, ValueError, RecursionError):
        return whole(str(answer))


def caller(tools: Mapping[str, NamedCall]) -> Callable[[str, Mapping[str, Any]], Awaitable[str]]:
    """Makes calls by name. Raises ToolError for an unknown tool."""

    async def make(name: str, arguments: Mapping[str, Any]) -> str:
        if name not in tools:
            raise ToolError(f"there is no tool {name}; there are {', '.join(sorted(tools)) or 'none'}")
        return await tools[name](arguments)

    return make


def _arguments(function: Callable[..., Any], tool: Tool, field: str) -> Any:
    """A pydantic model of the parameters that the policy gives: all without an option. Its fields are numbered.

    Numbers, because a parameter may have a name that is not allowed for a field.
    """
    place = f"{field}.function = {tool.function}"
    fields: dict[str, Any] = {}
    try:
        hints = inspect.get_annotations(function, eval_str=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise ConfigError(
            f"a type hint of it cannot be read: {failure_of(error, tool)}",
            where=place,
            remedy="import what the hint names at the top of its module, and not for type checkers alone",
        ) from error
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or name in tool.options:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"its parameter {name} can be given by its place alone",
                where=place,
                remedy="take the / out: the model gives arguments by name",
            )
        if name not in hints:
            raise ConfigError(
                f"its parameter {name} has no type hint",
                where=place,
                remedy="give it one: the model is shown the types",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"p{len(fields)}"] = (hints[name], Field(default, alias=name))
    try:
        made = create_model(f"{function.__name__}_arguments", __config__=_STRICT, **fields)
        # a default without a form in JSON is left out
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.model_json_schema()
    except PydanticUserError as error:
        hinted = ", ".join(f"{field.alias}: {hint}" for hint, field in fields.values())
        raise ConfigError(
            f"a type hint of it has no JSON form ({hinted})",
            where=place,
            remedy="take text, numbers, booleans, lists, mappings, dataclasses or pydantic models: the model writes JSON",
        ) from error
    return made


def _schema(name: str, function: Callable[..., Any], arguments: Any, field: str) -> dict[str, Any]:
    from docstring_parser import parse

    text = parse(inspect.getdoc(function) or "")
    if not text.short_description:
        raise ConfigError(
            f"{name} has no docstring",
            where=f"{field}.function",
            remedy="say in it what the tool does: the model is shown its first paragraph",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = arguments.model_json_schema()
    made.pop("title", None)
    described_as = {item.arg_name: item.description for item in text.params if item.description}
    for parameter, schema in made.get("properties", {}).items():
        schema.pop("title", None)
        if parameter in described_as:
            schema["description"] = described_as[parameter]
    made.pop("additionalProperties", None)
    description = " ".join(filter(None, (text.short_description, text.long_description)))
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": made},
    }
