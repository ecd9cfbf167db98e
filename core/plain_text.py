"""Text that every table, log, tracker, server and terminal accepts.

A Python string may hold half a character: a surrogate without its other half, as `json.loads('"\\ud83d"')` makes, or a byte
that is no UTF-8, as `surrogateescape` reads it. UTF-8 has no form for either, so most libraries raise. Here they become the six
characters of their escape, which people can read. Owns that form; does not know who writes text.

A terminal interprets control characters, which may move its cursor, name its window or fill its clipboard. On the console here
each becomes its escape too. Colours are rich's own.
"""

import io
import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# terminals interpret these characters; tab and newline are kept
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def whole(text: str) -> str:
    """The text with each half character as its escape, so that UTF-8 can hold it. Other texts stay unchanged."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def whole_values(value: Any) -> Any:
    """A JSON value with every text in it whole, keys of mappings too."""
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, Mapping):
        return {whole_values(name): whole_values(item) for name, item in value.items()}
    if isinstance(value, list):
        return [whole_values(item) for item in value]
    if isinstance(value, tuple):
        return tuple(map(whole_values, value))
    return value


def printable(text: str) -> str:
    """A text to be printed: whole, and with control characters as their escapes, such as moves of a terminal's cursor."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", whole(text))


def printable_json(value: Any, **options: Any) -> str:
    """JSON to be printed: `json_text`, also with escapes for control characters that JSON leaves alone. It parses to the same."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text(value, **options))


def json_text(value: Any, **options: Any) -> str:
    """JSON with the letters of every language unescaped. Half a character keeps its escape, so that it parses to the same."""
    return whole(json.dumps(value, ensure_ascii=False, **options))


def take_any_text() -> None:
    """From now on, stdout, stderr and the log of this process accept any text and escape what they cannot write.

    They also escape control characters in lines of the log, which a terminal would interpret.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_PrintableLine)


class _PrintableLine(logging.LogRecord):
    """A line of the log, which a terminal shows, and Prefect's server stores as JSON."""

    def getMessage(self) -> str:
        return printable(super().getMessage())

    # a formatter keeps the traceback here, with the words of the error
    @property
    def exc_text(self) -> str | None:
        return self.__dict__.get("_exc_text")

    @exc_text.setter
    def exc_text(self, text: str | None) -> None:
        self.__dict__["_exc_text"] = text and printable(text)


class PlainConsole(Console):
    """A console of rich that writes text unchanged, except for escaped control characters. Brackets in a text are no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """rich's segments with printable text."""
        for segment in super().render(renderable, options):
            # rich's own terminal commands are control segments
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def write_line(line: str, stream: TextIO | None = None) -> None:
    """Write a line to a stream of this process, stdout if none is given."""
    print(printable(line), file=stream or sys.stdout, flush=True)
