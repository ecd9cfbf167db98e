"""What was said in a sample, as messages that any page or terminal can show: texts alone, each with its role.

Owns what is a picture: only what the data gave, as a picture of the run's folder that was decoded, or as PNG, JPEG, GIF or WebP
in a data URL. All that a model wrote is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.core.contracts.images import NAME, SHOWN, is_image
from millrace.core.plain_text import json_text, whole, whole_values

PICTURE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+")
Pictures = Callable[[str], str | None]
"""Gets a picture's name. Returns it as a data URL; None if it cannot be shown."""
THINKING = re.compile(r"<think(?:ing)?>(.*?)(?:</think(?:ing)?>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class MessagePart:
    """A part of a message. kind: text, thinking, call (of a tool, its arguments as JSON) or picture (a data URL)."""

    kind: str
    text: str
    name: str = ""  # of the called tool


@dataclass(frozen=True)
class Message:
    """A message of a conversation. generated: the policy wrote it."""

    role: str
    parts: list[MessagePart] = field(default_factory=list)
    generated: bool = False


def no_pictures(name: str) -> None:
    """Shows no picture."""


def conversation(
    row: Mapping[str, Any], system: str | None = None, pictures: Pictures = no_pictures
) -> list[Message]:
    """The messages of a stored sample, the prompt's first. system: the message that its source puts before prompts without one."""
    prompt = json.loads(row["prompt"])
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if system is not None and asked and asked[0].get("role") != "system":
        asked = [{"role": "system", "content": system}, *asked]
    if row.get("dialogue"):
        messages = json.loads(row["dialogue"])
        given = messages[: len(asked)]
        later = messages[len(asked) :]
        return [
            *(_message(each, True, pictures) for each in given),
            *(_message(each, False) for each in later),
        ]
    answer = Message("assistant", spoken(row["response"]), generated=True)
    return [*(_message(each, True, pictures) for each in asked), answer]


def spoken(text: str) -> list[MessagePart]:
    """A generated text: what was thought and what was said."""
    found: list[MessagePart] = []
    at = 0
    for match in THINKING.finditer(text):
        found += (
            [MessagePart("text", whole(text[at : match.start()]))] if text[at : match.start()].strip() else []
        )
        found.append(MessagePart("thinking", whole(match[1])))
        at = match.end()
    rest = text[at:]
    return [*found, MessagePart("text", whole(rest))] if rest or not found else found


def readable_json(stored: str | None) -> str | None:
    """A stored label or metadata for reading: a text unchanged, other values as JSON."""
    if stored is None:
        return None
    value = json.loads(stored)
    return whole(value) if isinstance(value, str) else json_text(value)


def _message(message: Mapping[str, Any], of_data: bool, pictures: Pictures = no_pictures) -> Message:
    role = whole(str(message.get("role", "")))
    generated = role == "assistant" and not of_data
    parts: list[MessagePart] = []
    if thought := message.get("reasoning_content"):
        parts.append(MessagePart("thinking", whole(str(thought))))
    content = message.get("content")
    if isinstance(content, str):
        parts += spoken(content) if role == "assistant" else [MessagePart("text", whole(content))]
    elif isinstance(content, list):
        parts += [_part(item, of_data, pictures) for item in content]
    elif content is not None:
        parts.append(MessagePart("text", json_text(content)))
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments", "") if isinstance(function, Mapping) else ""
        text = arguments if isinstance(arguments, str) else json_text(whole_values(arguments))
        parts.append(MessagePart("call", whole(text), whole(str(function.get("name", "")))))
    return Message(role, parts, generated)


def _part(item: Any, of_data: bool, pictures: Pictures) -> MessagePart:
    if isinstance(item, Mapping):
        if of_data and is_image(item) and NAME.fullmatch(name := str(item.get("image"))):
            shown = pictures(name)
            return MessagePart("picture", shown) if shown else MessagePart("text", f"(image {name[:SHOWN]})")
        if item.get("type") == "text":
            return MessagePart("text", whole(str(item.get("text", ""))))
        url = item.get("image_url") or item.get("image")
        url = url.get("url") if isinstance(url, Mapping) else url
        if of_data and isinstance(url, str) and PICTURE.fullmatch(url):
            return MessagePart("picture", url)
    return MessagePart("text", json_text(whole_values(item)))
