"""Items of a configuration that rows name in their metadata. Pure.

A row names a key, never an import path: data cannot choose code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar


class Named(Protocol):
    """An item of a list of the configuration."""

    @property
    def name(self) -> str: ...


class UnknownNameError(ValueError):
    """A row names what the configuration does not have."""


Item = TypeVar("Item", bound=Named)


def named_by_row(
    items: Sequence[Item],
    metadata: Mapping[str, Any],
    key: str,
    field: str,
    unknown: type[UnknownNameError],
) -> Item | None:
    """The item that a row names; None if it names none, or if there are no items.

    key: the metadata's key with the name. field: the configuration's field with the items. Errors: `unknown`.
    """
    chosen = metadata.get(key) if items else None
    if chosen is None:
        return None
    for item in items:
        if item.name == chosen:
            return item
    names = ", ".join(item.name for item in items)
    raise unknown(f"its metadata.{key} is {str(chosen)[:40]!r}, and {field} has {names}")
