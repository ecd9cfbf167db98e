"""Writes all text to terminals. Owns that no terminal interprets the text.

Model output, prompts, names and the words of judges and of errors may hold control characters, which move a terminal's cursor,
name its window or fill its clipboard. Here each becomes its escape. Colours are rich's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from millrace.core.plain_text import printable


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
