"""Pictures in prompts: the parts of a message's content, and the pictures that a request sends beside its tokens. Pure.

A message with pictures has a list of parts as its content: {"type": "text", "text": ...} and {"type": "image", "image": NAME}. NAME
is the hash of the picture's pixels, by which the run's folder has it. Owns these forms and how data gives pictures; knows nothing
of files or of a picture's content.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "<image>"  # stands in a text for the next picture of the row
NAME = re.compile(r"[0-9a-f]{64}")
SHOWN = 8  # digits of a name, for people
DATA_URL = "data:image/png;base64,"
Given = str | bytes
"""A picture as data gives it: a path, a URL or a data URL, or the bytes of a file."""
Content = str | list[dict[str, Any]]
"""A message's content: text, or parts with at least one picture."""


def given_image(value: Any) -> Given:
    """A picture as a column or a message gives it. Raises ValueError, with `kind of reason: details`, for anything else."""
    if isinstance(value, Mapping):
        held = {name: item for name, item in value.items() if item is not None}
        inner = next(
            (held[name] for name in ("bytes", "image_url", "image", "url", "path") if name in held), None
        )
        if inner is None:
            raise ValueError(
                f"bad image: an object without bytes or path, only {', '.join(map(str, held))[:40] or 'nothing'}"
            )
        return given_image(inner)
    if isinstance(value, bytes | str) and value:
        return value
    raise ValueError(
        f"bad image: {'empty' if value in (b'', '') else type(value).__name__}, not a path, a URL or bytes"
    )


def given_images(value: Any) -> list[Given]:
    """The pictures of a column: one, a list of them, or none. Raises ValueError as `given_image` does."""
    if value is None:
        return []
    return [given_image(item) for item in value] if isinstance(value, list | tuple) else [given_image(value)]


class RowImages:
    """The pictures of a row in the order of its prompt: the column, each taken once, and what messages bring."""

    def __init__(self, column: Sequence[Given]) -> None:
        self._column = list(column)
        self._taken = 0
        self.found: list[Given] = []

    def part(self, own: Any = None) -> dict[str, Any]:
        """The part of the next picture, which has its number. own: what the message itself brings; None: it is the column's next.

        Raises ValueError, with `kind of reason: details`, if the column has no other.
        """
        if own is not None:
            self.found.append(given_image(own))
        elif self._taken == len(self._column):
            raise ValueError(
                f"images do not match: the row has {self._taken}, and its prompt has places for more"
            )
        else:
            self.found.append(self._column[self._taken])
            self._taken += 1
        return {"type": "image", "image": len(self.found) - 1}

    def parts(self, text: str) -> list[dict[str, Any]]:
        """The parts of a text, in which MARK stands for pictures."""
        found: list[dict[str, Any]] = []
        for number, piece in enumerate(text.split(MARK)):
            found += [self.part()] if number else []
            found += [{"type": "text", "text": piece}] if piece else []
        return found

    def check_all_taken(self) -> None:
        """Raises ValueError, with `kind of reason: details`, for a picture of the column that has no place."""
        if self._taken < len(self._column):
            raise ValueError(
                f"images do not match: the row has {len(self._column)}, and its prompt has {self._taken} times {MARK}"
            )


def is_image(part: Any) -> bool:
    """Whether a part of a content is a picture."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def as_content(parts: Sequence[dict[str, Any]]) -> Content:
    """The content of these parts: text if none is a picture."""
    return list(parts) if any(map(is_image, parts)) else "".join(part["text"] for part in parts)


def _parts(prompt: Any) -> Iterable[dict[str, Any]]:
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content")
        yield from content if isinstance(content, list) else ()


def image_names(prompt: Any) -> list[str]:
    """The names of a prompt's pictures, in their order; none for a text."""
    return [part["image"] for part in _parts(prompt) if is_image(part)]


def named(prompt: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The prompt with the names of its pictures instead of their numbers."""

    def part(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "image": names[given["image"]]} if is_image(given) else given

    return [
        {**message, "content": [*map(part, message["content"])]}
        if isinstance(message.get("content"), list)
        else message
        for message in prompt
    ]


def text_alone(content: Any) -> str:
    """The text of a content, without its pictures."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def with_words(content: Any) -> Any:
    """A content for readers of text, with each picture as the start of its name; any other content is returned unchanged."""
    if not isinstance(content, list) or not any(map(is_image, content)):
        return content
    return "".join(
        f"(image {str(part['image'])[:SHOWN]})" if is_image(part) else str(part.get("text", ""))
        for part in content
    )


def data_url(png: bytes) -> str:
    """A PNG file as a data URL."""
    return DATA_URL + base64.b64encode(png).decode()


@dataclass(frozen=True)
class SentImage:
    """A picture of a request: its PNG file, and how many tokens stand for it."""

    png: bytes
    tokens: int

    @property
    def data_url(self) -> str:
        """The file as a data URL."""
        return data_url(self.png)


@dataclass(frozen=True)
class SentImages:
    """The pictures of a request in their order. token: the id that stands for them in the prompt."""

    token: int
    images: tuple[SentImage, ...]

    def compressed(self, ids: Sequence[int]) -> list[int]:
        """Token ids in which each picture's tokens are one, as engines want them beside the pictures themselves."""
        found: list[int] = []
        at = 0
        for image in self.images:
            start = ids.index(self.token, at)
            assert all(token == self.token for token in ids[start : start + image.tokens]), (
                "a picture's tokens are together"
            )
            found += [*ids[at:start], self.token]
            at = start + image.tokens
        assert self.token not in ids[at:], "no picture is missing"
        return [*found, *ids[at:]]
