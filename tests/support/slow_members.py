"""Members of a parametrisation that run in the default suite; the rest are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(members: Iterable[Any], *fast: Any) -> list[Any]:
    """The members in order, all slow but the named ones. A member with an id goes by its id."""
    listed = [(member, member.id if hasattr(member, "marks") else member) for member in members]
    unknown = [name for name in fast if name not in [known for _, known in listed]]
    if unknown:
        raise ValueError(f"no members: {unknown}")
    return [member if name in fast else _slow(member) for member, name in listed]


def _slow(member: Any) -> Any:
    if hasattr(member, "marks"):
        return pytest.param(*member.values, id=member.id, marks=[*member.marks, pytest.mark.slow])
    values = member if isinstance(member, tuple) else (member,)
    return pytest.param(*values, marks=pytest.mark.slow)
