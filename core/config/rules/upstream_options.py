"""Upstream options as a configuration passes them through: which are millrace's, refused, or set by another field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.core.config.parts.problems import Problem
from millrace.core.config.rules.passthrough import SECRETS


def option_problems(
    place: str,
    options: Mapping[str, Any],
    owned: Sequence[str],
    refused: Mapping[str, str],
    elsewhere: Mapping[str, str],
) -> Iterator[Problem]:
    """Upstream options that may not stand there: millrace's own, refused ones, and those that another field sets."""
    for name, value in options.items():
        field = f"{place}.{name}"
        if name in owned:
            yield Problem(field, value, "millrace sets it itself", "remove it")
        elif name in refused:
            shown = "***" if name in SECRETS else value
            yield Problem(field, shown, f"not allowed: {refused[name]}", "remove it")
        elif name in elsewhere:
            yield Problem(
                field, value, f"it follows from {elsewhere[name]}", "remove it and set that instead"
            )
