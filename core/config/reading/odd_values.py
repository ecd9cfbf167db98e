"""Values that parse but that no field can mean: numbers that are not finite or far too large, text that is not text. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.core.config.parts.problems import Problem

LARGEST = 2**63 - 1  # what files, databases and torch hold
TEXT_SHOWN = 60


def odd_values(
    values: Any, place: tuple[int | str, ...] = ()
) -> Iterator[tuple[tuple[int | str, ...], Problem]]:
    """Each value below `values` that no field can mean, by its place; options of user functions are included."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from odd_values(value, (*place, key))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from odd_values(value, (*place, index))
    else:
        field = ".".join(map(str, place))
        if isinstance(values, float) and not math.isfinite(values):
            yield place, Problem(field, values, "not a finite number", "give a number")
        elif isinstance(values, int) and abs(values) > LARGEST:
            shown = f"an integer of {values.bit_length()} bits"
            yield place, Problem(field, shown, "too large", f"give a whole number up to {LARGEST}")
        elif isinstance(values, str) and not _is_text(values):
            shown = values[:TEXT_SHOWN].encode("unicode_escape").decode()
            yield (
                place,
                Problem(field, shown, "holds half a character, which UTF-8 cannot store", "remove it"),
            )


def _is_text(value: str) -> bool:
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False
