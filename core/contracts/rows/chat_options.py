"""What a chat template gets besides the messages of a row: tools, and the row's variables. Pure.

Owns how both are read from a row's columns, and their keys in its metadata, by which they reach storage, sessions and rewards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"  # keys in a row's metadata
RESERVED = frozenset(  # variables that the renderer itself sets, and how it renders
    [
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "raise_exception",
        "strftime_now",
    ]
)


class ChatColumns(Protocol):
    """A source's settings of its chat template."""

    @property
    def tools_key(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]: ...
    @property
    def chat_template_kwargs_key(self) -> str | None: ...


@dataclass(frozen=True)
class ChatOptions:
    """What the template gets for one row."""

    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


PLAIN = ChatOptions()


def chat_options(source: ChatColumns, metadata: Mapping[str, Any] | None) -> ChatOptions:
    """The options of a row with this metadata. The row's variables override its source's."""
    given = metadata or {}
    own = given.get(TEMPLATE_KWARGS) if source.chat_template_kwargs_key else None
    tools = given.get(TOOLS) if source.tools_key else None
    return ChatOptions(tools or (), {**source.chat_template_kwargs, **(own or {})})


def row_tools(value: Any) -> tuple[list[dict[str, Any]], str | None]:
    """The tools in a column, which may be JSON text, and what is wrong with them."""
    value, problem = from_json(value, TOOLS)
    if problem or value is None:
        return [], problem
    if not isinstance(value, list):
        return [], f"wrong type: tools are {type(value).__name__}, not a list"
    for number, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return [], f"bad tool: number {number}: no function.name, as OpenAI's form of tools has it"
    return [dict(tool) for tool in value], None


def row_template_kwargs(value: Any) -> tuple[dict[str, Any], str | None]:
    """The template's variables in a column, which may be JSON text, and what is wrong with them."""
    value, problem = from_json(value, TEMPLATE_KWARGS)
    if problem or value is None:
        return {}, problem
    if not isinstance(value, Mapping):
        return {}, f"wrong type: {TEMPLATE_KWARGS} are {type(value).__name__}, not an object"
    reserved = sorted(RESERVED & value.keys())
    if reserved:
        return {}, f"reserved name: {reserved[0]} in {TEMPLATE_KWARGS}"
    return {str(name): item for name, item in value.items()}, None


def from_json(value: Any, what: str) -> tuple[Any, str | None]:
    if not isinstance(value, str):
        return value, None
    try:
        return json.loads(value) if value.strip() else None, None
    except (ValueError, RecursionError):
        return None, f"wrong type: {what} are text that is not JSON"
