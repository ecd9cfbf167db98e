"""How answers are shown: as they come, one beside the other where there are two. Text of a model or tool acts on no terminal.

Owns widths and order. Every text is made printable here, before anything measures or prints it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.live import Live
from rich.table import Table
from rich.text import Text

from millrace.core.plain_text import PlainConsole, printable
from millrace.flows.chat.talk import Shown

EACH_S = 0.1  # between two pictures of answers side by side


@dataclass
class PrintedAnswer:
    """One answer, printed as it comes."""

    console: PlainConsole
    at_start: bool = True

    def text(self, piece: str) -> None:
        """Print the next piece of an answer."""
        self._write(printable(piece))

    def event(self, line: str) -> None:
        """Print a line of its own."""
        self._write(f"{'' if self.at_start else chr(10)}{printable(line)}\n")

    def _write(self, text: str) -> None:
        if text:
            self.at_start = text.endswith("\n")
            self.console.file.write(text)
            self.console.file.flush()

    def end(self) -> None:
        """End the line."""
        if not self.at_start:
            self._write("\n")


@dataclass
class KeptAnswer:
    """One answer among several, kept until it is drawn."""

    title: str
    said: str = ""

    def text(self, piece: str) -> None:
        """Keep the next piece of an answer."""
        self.said += printable(piece)

    def event(self, line: str) -> None:
        """Keep a line of its own."""
        self.said += f"{'' if not self.said or self.said.endswith(chr(10)) else chr(10)}{printable(line)}\n"


@dataclass
class SideBySide:
    """Answers of several models to one message, beside each other."""

    columns: Sequence[KeptAnswer] = field(default_factory=list)

    def __rich__(self) -> Table:
        table = Table(expand=True)
        for column in self.columns:
            table.add_column(Text(column.title), ratio=1, overflow="fold")
        table.add_row(*(Text(column.said.rstrip("\n")) for column in self.columns))
        return table


@contextlib.contextmanager
def shown(console: PlainConsole, titles: Sequence[str]) -> Iterator[Sequence[Shown]]:
    """Where the answers to one message go: one is printed as it comes; several are drawn anew ten times a second.

    Without a terminal several answers are printed one after the other, once all are there.
    """
    if len(titles) == 1:
        stream = PrintedAnswer(console)
        try:
            yield [stream]
        finally:
            stream.end()
        return
    columns = [KeptAnswer(printable(title)) for title in titles]
    beside = SideBySide(columns)
    if console.is_terminal:
        with Live(beside, console=console, refresh_per_second=1 / EACH_S):
            yield columns
        return
    yield columns
    for column in columns:
        console.file.write(f"{column.title}\n{column.said.rstrip(chr(10))}\n\n")
