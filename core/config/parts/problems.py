"""Problems of a configuration, with field, value, reason and remedy, and how they are shown."""

import difflib
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from millrace.core.config.parts.redaction import HIDDEN, is_reference, shown

SECRET_FIELDS = ("engines.key", "algorithm.teacher_server.key")
ROWS = 22  # a screen has 24 rows, one for the command and one for the prompt
LONGEST_VALUE = 60


class Problem(NamedTuple):
    """A field with a problem: its value, what is wrong with it, and the remedy."""

    field: str
    value: Any
    reason: str
    remedy: str

    def __str__(self) -> str:
        given = shown({self.field.rpartition(".")[2]: self.value}).popitem()[1]
        if self.field in SECRET_FIELDS and not is_reference(given):
            given = HIDDEN
        value = "" if self.value is None else f" = {_short(given)}"
        return f"{self.field}{value}: {self.reason}; {self.remedy}"


def render_problems(problems: Sequence[Problem], rows: int = ROWS, columns: int | None = None) -> str:
    """All problems as text that fits one screen. For the rest only the fields are named."""
    width = columns or max(60, shutil.get_terminal_size((80, 24)).columns)
    lines = [f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the configuration:"]
    for number, problem in enumerate(problems):
        block = textwrap.wrap(
            str(problem),
            width,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        rest = problems[number:]
        room = rows - len(lines) - (0 if len(rest) == 1 else 2)
        if len(block) > room:
            named = textwrap.shorten(
                ", ".join(item.field for item in rest), max(width - 20, 20), placeholder=" ..."
            )
            return "\n".join([*lines, f"  and {len(rest)} more: {named}"])
        lines += block
    return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else "remove it"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
