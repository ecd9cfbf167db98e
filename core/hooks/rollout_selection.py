"""Which function makes a rollout: the function that its row names, else the section's. Pure.

A row names a key of `rollout.session.named`, never an import path: data cannot choose code.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.core.config.parts.user_function import UnknownNameError, UserFunction, named_by_row
from millrace.core.config.rollout import SessionSection

KEY = "rollout"  # key of a row's metadata


class UnknownRolloutError(UnknownNameError):
    """A row names a rollout that the configuration does not have."""


def rollout_function(session: SessionSection, metadata: Mapping[str, Any]) -> tuple[str, UserFunction | None]:
    """The field that names the function of a row's rollout, and the function; None if an environment or tools make it.

    Without `named`, the row's metadata have no effect. Errors: UnknownRolloutError.
    """
    named = named_by_row(session.named, metadata, KEY, "rollout.session.named", UnknownRolloutError)
    if named is None:
        return "rollout.session.function", session.function
    return f"rollout.session.named.{named.name}", named


def rollout_functions(session: SessionSection) -> Iterator[tuple[str, UserFunction | None]]:
    """Every field that may name a function that makes rollouts, with it."""
    yield "rollout.session.function", session.function
    for named in session.named:
        yield f"rollout.session.named.{named.name}", named
