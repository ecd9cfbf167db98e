"""One row of a data source made a prompt, or the reason why it cannot be one. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.ids import prompt_id

ROLES = ("system", "user", "assistant", "tool", "developer")
EXCERPT = 80


class Keys(Protocol):
    """Which columns of a source hold what."""

    @property
    def name(self) -> str: ...
    @property
    def prompt_key(self) -> str: ...
    @property
    def label_key(self) -> str | None: ...
    @property
    def metadata_key(self) -> str | None: ...


Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """A usable prompt: text or chat messages, with what the reward needs."""

    source: str
    row: int
    prompt_id: str
    prompt: Prompt
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Quarantined:
    """A row that cannot be used, and why."""

    source: str
    row: int
    reason: str
    excerpt: str


def parse_line(line: bytes, row: int, keys: Keys) -> PromptRow | Quarantined:
    """A line of JSONL as a prompt."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return _refuse(keys, row, f"not UTF-8: byte {error.start}", repr(line))
    if not text.strip():
        return _refuse(keys, row, "empty line", "")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _refuse(keys, row, f"not JSON: {error}", text)
    if not isinstance(values, Mapping):
        return _refuse(keys, row, f"not an object: {type(values).__name__}", text)
    return parse_row(values, row, keys)


def parse_row(values: Mapping[str, Any], row: int, keys: Keys) -> PromptRow | Quarantined:
    """A mapping of columns as a prompt."""
    shown = _text(values)
    if keys.prompt_key not in values:
        return _refuse(keys, row, f"missing key: {keys.prompt_key}", shown)
    prompt = values[keys.prompt_key]
    problem = _problem_of_prompt(prompt)
    if problem:
        return _refuse(keys, row, problem, shown)
    metadata = values.get(keys.metadata_key) if keys.metadata_key else None
    if isinstance(metadata, str) and metadata:
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return _refuse(keys, row, "metadata is no mapping: text that is not JSON", shown)
    if metadata is not None and not isinstance(metadata, Mapping):
        return _refuse(keys, row, f"metadata is no mapping: {type(metadata).__name__}", shown)
    label = values.get(keys.label_key) if keys.label_key else None
    if keys.label_key and keys.label_key in values and label is None:
        return _refuse(keys, row, f"empty label: {keys.label_key}", shown)
    if _has_lone_surrogate(shown):
        return _refuse(keys, row, "not UTF-8: lone surrogate", repr(shown))
    return PromptRow(
        source=keys.name,
        row=row,
        prompt_id=prompt_id(keys.name, row, _text(prompt)),
        prompt=prompt if isinstance(prompt, str) else [dict(message) for message in prompt],
        label=label,
        metadata=dict(metadata or {}),
    )


def _problem_of_prompt(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "empty prompt"
    if not isinstance(prompt, list):
        return f"prompt is neither text nor messages: {type(prompt).__name__}"
    if not prompt:
        return "empty prompt"
    for message in prompt:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            return "bad message: each needs role and content"
        if message["role"] not in ROLES:
            return f"bad message: unknown role {str(message['role'])[:20]!r}"
        if not isinstance(message["content"], str | list):
            return f"bad message: content is {type(message['content']).__name__}"
    if not any(message["content"] for message in prompt):
        return "empty prompt"
    return None


def _has_lone_surrogate(text: str) -> bool:
    return any(0xD800 <= ord(letter) <= 0xDFFF for letter in text)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _refuse(keys: Keys, row: int, reason: str, shown: str) -> Quarantined:
    excerpt = shown[:EXCERPT].encode("utf-8", "backslashreplace").decode()
    return Quarantined(keys.name, row, reason.encode("utf-8", "backslashreplace").decode(), excerpt)
