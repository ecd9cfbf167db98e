"""What is wrong with a configuration, said so that it can be mended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing to mend: the field, its value, what is wrong with it, and the remedy."""

    field: str
    value: Any
    reason: str
    remedy: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {_short(self.value)}"
        return f"{self.field}{shown}: {self.reason}; {self.remedy}"


def render_problems(problems: Sequence[Problem], limit: int = 10) -> str:
    """All problems as text for one screen."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the configuration:"
    lines = [count, *(f"  {problem}" for problem in problems[:limit])]
    return "\n".join(lines + ([f"  and {len(problems) - limit} more"] if len(problems) > limit else []))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
