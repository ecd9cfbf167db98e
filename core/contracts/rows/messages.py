"""Chat messages in the forms that people write them, as the one form that templates read; and which of them are trained. Pure.

A message has a role, its content as text, no empty keys, and calls with arguments as objects. Every message is normalised here:
rows of all sources, observations of a session, requests of a client. Only `text_of` turns parts of a content into text, and
`content_of` where a row may have pictures. A message may carry a switch: `weight` (0 or 1), as OpenAI's format for fine-tuning has it, or `train` (true or false). Templates never
see it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from millrace.core.contracts.images import Content, RowImages, as_content

ROLES = ("system", "user", "assistant", "tool", "developer")
SENDERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "plain_text", "refusal")
TEXT_KEYS = ("text", "content", "value", "refusal")  # keys under which a part holds text
IMAGE_TYPES = ("image", "image_url", "input_image")
IMAGE_KEYS = ("image", "image_url", "bytes", "url", "path")  # keys under which such a part brings its picture
OF_TOOL_TEXT = {"type", "text", "annotations", "cache_control", "_meta"}  # keys of a part in a tool's answer
MEDIA = re.compile(
    "image|picture|pixel|audio|speech|video|file|document|inline_?data|resource", re.IGNORECASE
)
OBJECTS = re.compile(r"\s*\[\s*\{")
AS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]\s*:""")


class NotTextError(ValueError):
    """A content holds a part that a text model cannot read. The message says which part."""


def text_of(content: Any) -> str:
    """A message's content as text: its parts joined, None as no text. Raises NotTextError naming the first part that is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) and isinstance(content.get("parts"), list | tuple):
        content = content["parts"]
    if isinstance(content, Mapping):
        return _text_of_part(0, content)
    if isinstance(content, list | tuple):
        return "".join(_text_of_part(number, part) for number, part in enumerate(content))
    raise NotTextError(f"it is {type(content).__name__}, not text or parts of text")


def content_of(content: Any, images: RowImages) -> Content:
    """A message's content as text, or as parts if it has pictures, which are taken from `images` or brought by the message.

    Raises NotTextError naming the first part that is neither text nor a picture, ValueError for a wrong picture.
    """
    if isinstance(content, str):
        return as_content(images.parts(content))
    if not isinstance(content, list | tuple):
        return text_of(content)
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        if isinstance(part, Mapping) and str(part.get("type", "")) in IMAGE_TYPES:
            own = [part[key] for key in IMAGE_KEYS if part.get(key) is not None]
            parts.append(images.part(*own[:1]))
        else:
            parts += images.parts(_text_of_part(number, part))
    return as_content(parts)


def _text_of_part(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise NotTextError(f"part {number} is {'null' if part is None else type(part).__name__}, no object")
    held = {str(key): value for key, value in part.items() if value not in (None, [], {})}
    kind = str(held.get("type") or held.get("content_type") or held.get("kind") or "")
    if kind and kind.lower() not in TEXT_TYPES:
        raise NotTextError(f"part {number} is of type {kind[:40]}, which a model of text cannot be shown")
    media = next((key for key in held if MEDIA.search(key)), None)
    if media:
        raise NotTextError(f"part {number} holds {media[:40]}, which a model of text cannot be shown")
    text = next((held[key] for key in TEXT_KEYS if key in held), None)
    if isinstance(text, Mapping):  # {"value": ..., "annotations": [...]}
        text = text.get("value")
    if not isinstance(text, str):
        raise NotTextError(f"part {number} holds no text, only {', '.join(held)[:40] or 'nothing'}")
    return text


class NotJsonError(ValueError):
    """Calls of tools are text that is not JSON."""


def message_of(given: Mapping[str, Any], images: RowImages | None = None) -> dict[str, Any]:
    """A message with its content as text, and without empty keys, such as an empty list of calls.

    images: of its row; with them a content may have pictures. Raises NotTextError, NotJsonError for calls that are text and not
    JSON, and ValueError for a wrong picture.
    """
    content = given.get("content")
    held = {**given, "content": text_of(content) if images is None else content_of(content, images)}
    if isinstance(held.get("tool_calls"), str):
        try:
            held["tool_calls"] = json.loads(held["tool_calls"].strip() or "null")
        except ValueError as error:
            raise NotJsonError(str(error)) from error
    return {str(key): value for key, value in held.items() if value not in (None, [], {})}


def text_of_answer(answer: Any) -> str | None:
    """A tool's answer in content parts as text, with other parts as their type in brackets. None if it has no parts."""
    parts = [answer] if isinstance(answer, Mapping) else answer
    if not isinstance(parts, list | tuple) or not any(map(_is_text_part, parts)):
        return None
    if not all(_is_text_part(part) or _is_media_part(part) for part in parts):
        return None
    return "".join(part["text"] if _is_text_part(part) else f"({part['type']})" for part in parts)


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") in TEXT_TYPES
        and isinstance(part.get("text"), str)
        and part.keys() <= OF_TOOL_TEXT
    )


def _is_media_part(part: Any) -> bool:
    return isinstance(part, Mapping) and bool(MEDIA.search(str(part.get("type") or "")))


def from_text(text: str) -> list[Any] | None:
    """Messages that a column has as JSON text; None for any other text.

    Raises ValueError for text that starts as messages do and is no JSON: Python's form of a list, or JSON that was cut off.
    """
    if not OBJECTS.match(text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if AS_MESSAGES.match(text):
            raise ValueError(f"it starts as a list of messages does, and is not JSON: {error}") from error
        return None
    known = all(isinstance(each, Mapping) and ("role" in each or _is_sharegpt(each)) for each in found)
    return list(found) if known else None


def from_sharegpt(value: Sequence[Any], keep: Sequence[str] = ()) -> list[Any]:
    """ShareGPT's messages, {from, value}, as {role, content}; others unchanged. Raises ValueError for an unknown sender.

    keep: further keys of a message.
    """
    if not value or not all(_is_sharegpt(message) for message in value):
        return list(value)
    messages: list[Any] = []
    for number, message in enumerate(value):
        role = SENDERS.get(message["from"]) if isinstance(message["from"], str) else None
        if role is None:
            known = ", ".join(SENDERS)
            raise ValueError(
                f"bad message: number {number}: from is {str(message['from'])[:20]!r}, not one of {known}"
            )
        kept = {name: message[name] for name in keep if name in message}
        messages.append({"role": role, "content": message["value"], **kept})
    return messages


def _is_sharegpt(message: Any) -> bool:
    return (
        isinstance(message, Mapping) and "from" in message and "value" in message and not message.get("role")
    )


def with_read_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with arguments of tool calls as objects, which OpenAI's form has as JSON text. No arguments are an empty object.

    Raises ValueError for a call that cannot be read.
    """
    read: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            read.append(dict(message))
            continue
        try:
            read.append({**message, "tool_calls": [_call(call) for call in calls]})
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(
                f"bad message: number {number}: a tool call has no function with JSON arguments"
            ) from error
    return read


def _call(call: Any) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


LossOn = Literal["answer", "assistant", "last_assistant"]
SWITCHES = ("weight", "train")
Message = Mapping[str, Any]


def trained_messages(messages: Sequence[Message], loss_on: LossOn) -> list[int]:
    """Numbers of the messages that are trained, in order. A message's switch overrides the source's setting.

    Raises ValueError, with `kind of reason: details`, for a switch that cannot be obeyed, or if no message is trained.
    """
    assert loss_on != "answer", "an answer is not a message"
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = said if loss_on == "assistant" else said[-1:]
    trained: list[int] = []
    for number, message in enumerate(messages):
        own = _switch(number, message)
        if own and message["role"] != "assistant":
            raise ValueError(
                f"bad message: number {number}: it is to be trained, and its role is {message['role']}, not assistant"
            )
        if own or (own is None and number in wanted):
            trained.append(number)
    if not trained:
        raise ValueError(
            "nothing to train: no message is the assistant's"
            if not said
            else "nothing to train: every message of the assistant is switched off"
        )
    return trained


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without their switches."""
    return [{name: item for name, item in message.items() if name not in SWITCHES} for message in messages]


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The messages, after this system message if they have none at the start."""
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*(first if messages[0]["role"] != "system" else []), *messages]


def _switch(number: int, message: Message) -> bool | None:
    """A message's switch: whether it is trained; None without a switch."""
    said: list[bool] = []
    for name in SWITCHES:
        value = message.get(name)
        if value is None:
            continue
        # true and false equal 1 and 0, so `train` passes too
        if value not in (0, 1):
            raise ValueError(f"bad message: number {number}: {name} is {str(value)[:20]}, neither 0 nor 1")
        said.append(bool(value))
    if len(set(said)) == 2:
        raise ValueError(f"bad message: number {number}: its weight and its train contradict each other")
    return said[0] if said else None
