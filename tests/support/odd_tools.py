"""Tools whose functions are odd: some that a model can be shown all the same, and some that it cannot."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal


class Thing:
    """What has no JSON form."""


@dataclass
class Point:
    """What has one."""

    x: int
    y: int = 0


def undefined(x: Missing) -> str:  # noqa: F821
    """A hint that is nowhere."""


def own_class(x: Thing) -> str:
    """A hint of a class."""


def function(x: Callable[[int], int]) -> str:
    """A hint of a function."""


def by_place(x: int, /) -> str:
    """A parameter without a name."""


def no_hint(x) -> str:
    """A parameter without a hint."""


def no_docstring(x: int) -> str:
    return str(x)


async def yields(x: int) -> AsyncIterator[int]:
    """An answer in pieces."""
    yield x


class Called:
    """An object that can be called."""

    def __call__(self, x: int) -> str:
        """Answer."""
        return str(x)


called = Called()


def names(self: int, tool: str, model_config: int, schema: str, _hidden: bool = True) -> str:
    """Parameters whose names mean something elsewhere."""
    return f"{self} {tool} {model_config} {schema} {_hidden}"


def kinds(
    point: Point, kind: Literal["a", "b"] = "a", many: list[int] | None = None, odd: Any = Thing
) -> str:
    """Parameters of several kinds."""
    return f"{point.x + point.y} {kind} {many} {odd is Thing}"
