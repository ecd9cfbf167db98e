"""What a tool or an environment of a user may do wrong, by name: each of them as a tool, and at each place of an environment."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from typing import Any

from millrace.core.sessions.interface import Done, Observation, Session, Task, Turn


def loops_for_ever() -> None:
    """Never give the loop back."""
    while True:
        pass


def takes_memory() -> None:
    """Take 4 GiB."""
    bytearray(4 << 30)


def forks() -> None:
    """Start itself again and again."""
    while True:
        os.fork()


def raises() -> None:
    """Raise what has no text."""
    raise KeyError


def hangs_in_c() -> None:
    """Hold the interpreter in C."""
    ctypes.PyDLL(None).sleep(3600)


def ends_the_process() -> None:
    """End the process that all its neighbours run in."""
    os._exit(5)


HOSTILE: dict[str, Callable[[], None]] = {
    each.__name__: each  # type: ignore[attr-defined]
    for each in (loops_for_ever, takes_memory, forks, raises, hangs_in_c, ends_the_process)
}


def tool(what: str) -> Any:
    """Do something that no tool should.

    Args:
        what: Its name.
    """
    if what == "no_text":
        return {"odd": b"\xff", 1: float("nan"), "self": object()}
    return HOSTILE[what]()


async def slow_tool(what: str) -> str:
    """Wait for ever, and let others go on.

    Args:
        what: Anything.
    """
    await asyncio.sleep(3600)
    return what


class Hostile:
    """An environment of three steps that does something wrong at one of its places, unless the row says that it is a good one."""

    def __init__(self, what: str, where: str, recovery: str) -> None:
        self._what, self._where, self.recovery = what, where, recovery
        self._good, self._left = False, 3

    async def reset(self, task: Task) -> Observation | None:
        """Begin."""
        self._good = bool(task.metadata.get("good"))
        return await self._at("reset", Observation("go"))

    async def step(self, turn: Turn) -> Observation | Done:
        """Go on, and a good one slowly: it is under way when a bad one does its harm."""
        if self._good:
            await asyncio.sleep(0.3)
        self._left -= 1
        return await self._at("step", Observation(f"{self._left} left") if self._left else Done(1.0))

    def snapshot(self) -> str:
        """How many are left."""
        return f"{self._left} {int(self._good)}"

    def restore(self, state: str) -> None:
        """Go on from there."""
        self._left, self._good = (int(number) for number in state.split())

    async def close(self) -> None:
        """Let go."""
        await self._at("close", None)

    async def _at(self, place: str, outcome: Any) -> Any:
        if place != self._where or self._good:
            return outcome
        if self._what == "no_text":
            return b"\xff"
        if self._what == "sleeps":
            await asyncio.sleep(3600)
        HOSTILE[self._what]()
        return outcome


async def calls_or_is_good(session: Session, *, tool: str, what: str) -> float:
    """A rollout that calls a tool, unless the row says that it is a good one, which takes a while."""
    turn = await session.generate()
    if session.task.metadata.get("good"):
        for _ in range(2):
            await asyncio.sleep(0.3)
            turn = await session.generate("again")
        return 3.0
    session.observe(await session.call(tool, what=what))
    await session.generate()
    return float(len(turn.text))
