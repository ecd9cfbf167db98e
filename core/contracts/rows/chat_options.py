"""What a chat template gets beside the messages of a row: tools, and variables of its own. Pure.

Owns how both are read from a row's columns, and where they lie in its metadata, with which they reach storage, sessions and
rewards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"  # keys in a row's metadata
RESERVED = frozenset(  # what the renderer itself hands to a template, and how it renders
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
SENDERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}


class ChatColumns(Protocol):
    """What a source says of its chat template."""

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
    """The options of a row with this metadata. The row's own variables come before those of its source."""
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
    tools = [_without_none(tool) for tool in value]
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return [], f"bad tool: number {number}: no function.name, as OpenAI's form of tools has it"
    return tools, None


def row_template_kwargs(value: Any) -> tuple[dict[str, Any], str | None]:
    """The template's variables in a column, which may be JSON text, and what is wrong with them. Null is not given."""
    value, problem = from_json(value, TEMPLATE_KWARGS)
    if problem or value is None:
        return {}, problem
    if not isinstance(value, Mapping):
        return {}, f"wrong type: {TEMPLATE_KWARGS} are {type(value).__name__}, not an object"
    reserved = sorted(RESERVED & value.keys())
    if reserved:
        return {}, f"reserved name: {reserved[0]} in {TEMPLATE_KWARGS}"
    return {str(name): item for name, item in value.items() if item is not None}, None


def from_sharegpt(value: list[Any], keep: Sequence[str] = ()) -> tuple[list[Any], str | None]:
    """ShareGPT's messages, {from, value}, as {role, content}; and what is wrong with them. Others as they are.

    keep: further keys of a message.
    """
    if not value or not all(_is_sharegpt(message) for message in value):
        return value, None
    messages: list[Any] = []
    for number, message in enumerate(value):
        role = SENDERS.get(message["from"]) if isinstance(message["from"], str) else None
        if role is None:
            known = ", ".join(SENDERS)
            return (
                [],
                f"bad message: number {number}: from is {str(message['from'])[:20]!r}, not one of {known}",
            )
        kept = {name: message[name] for name in keep if name in message}
        messages.append({"role": role, "content": message["value"], **kept})
    return messages, None


def with_read_arguments(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """The messages with arguments of tool calls as objects, which OpenAI's form has as JSON text; and what is wrong."""
    read: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            read.append(message)
            continue
        try:
            read.append({**message, "tool_calls": [_call(call) for call in calls]})
        except (ValueError, TypeError, LookupError):
            return [], f"bad message: number {number}: a tool call has no function with JSON arguments"
    return read, None


def _call(call: Any) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _is_sharegpt(message: Any) -> bool:
    return (
        isinstance(message, Mapping) and "from" in message and "value" in message and not message.get("role")
    )


def from_json(value: Any, what: str) -> tuple[Any, str | None]:
    if not isinstance(value, str):
        return value, None
    try:
        return json.loads(value) if value.strip() else None, None
    except (ValueError, RecursionError):
        return None, f"wrong type: {what} are text that is not JSON"


def _without_none(value: Any) -> Any:
    """Without the nulls that tables put where an object lacks a key that another has."""
    if isinstance(value, Mapping):
        return {str(name): _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
