"""What a row gives besides its messages: tools and variables for the chat template, and the length and stops of its own samples. Pure.

Owns how they are read from a row's columns, and their keys in its metadata, by which they reach storage, sessions and rewards.
Temperature and other parameters of the distribution are the same for the batch: the trainer computes log-probabilities with
them.
"""

import json
import re
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


SAMPLING = "sampling"  # key in a row's metadata
LENGTH, STOP, STOP_IDS, STOP_REGEX = "max_new_tokens", "stop", "stop_token_ids", "stop_regex"
OWN = (LENGTH, STOP, STOP_IDS, STOP_REGEX)


def row_sampling(value: Any) -> tuple[dict[str, Any], str | None]:
    """The sampling parameters in a column, which may be JSON text, and what is wrong with them. Null counts as not given."""
    value, problem = from_json(value, SAMPLING)
    if problem or value is None:
        return {}, problem
    if not isinstance(value, Mapping):
        return {}, f"wrong type: {SAMPLING} is {type(value).__name__}, not an object"
    given = {str(name): item for name, item in value.items() if item is not None}
    unknown = sorted(given.keys() - set(OWN))
    if unknown:
        return {}, f"bad {SAMPLING}: {unknown[0]} is not a row's to say, only {', '.join(OWN)}"
    length, stop, ids = given.get(LENGTH, 1), given.get(STOP, []), given.get(STOP_IDS, [])
    if not _is_whole(length) or length < 1:
        return {}, f"bad {SAMPLING}: {LENGTH} is {length!r}, not a whole number from 1"
    if not isinstance(stop, list) or not all(isinstance(item, str) and item for item in stop):
        return {}, f"bad {SAMPLING}: {STOP} is not a list of texts"
    if not isinstance(ids, list) or not all(_is_whole(item) and item >= 0 for item in ids):
        return {}, f"bad {SAMPLING}: {STOP_IDS} is not a list of token ids"
    patterns = given.get(STOP_REGEX, [])
    if not isinstance(patterns, list) or not all(isinstance(item, str) and _ends(item) for item in patterns):
        return (
            {},
            f"bad {SAMPLING}: {STOP_REGEX} is not a list of regular expressions, none of which fits the empty text",
        )
    return given, None


def own_sampling(metadata: Mapping[str, Any] | None, key: str | None, longest: int) -> dict[str, Any]:
    """The sampling parameters of a row with this metadata, which replace its section's.

    key: `sampling_key` of its source; without a key a row sets nothing. longest: `max_new_tokens` of the section. Memory is
    planned for it, so a row can only shorten it.
    """
    own = dict((metadata or {}).get(SAMPLING) or {}) if key else {}
    if LENGTH in own:
        own[LENGTH] = min(own[LENGTH], longest)
    return own


def _ends(pattern: str) -> bool:
    """Whether a pattern is a regular expression that does not match the empty response."""
    try:
        return re.compile(pattern).search("") is None
    except re.error:
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
