"""Stand-ins for parts in other processes: their methods answer the calls that name methods of the part's Protocol."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import Any, Self


class AskedHere:
    """One part, as an Asked."""

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self, method.__name__)(*args, **kwargs)
        return await answer if isawaitable(answer) else answer


class RanksHere(AskedHere):
    """The trainer's ranks, of which one answers for all, and the Trainer that brings them up."""

    async def at(self, version: int, ahead: int = 0) -> Self:
        return self

    async def each(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [await self.call(method, *args)]

    async def together(self, method: Callable[..., Any], *args: Any) -> Any:
        return await self.call(method, *args)
