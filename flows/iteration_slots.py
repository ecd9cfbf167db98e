"""Iterations one after the other, each a flow run of its own, which begins while the one before it hands over its weights.

To begin a flow run takes Prefect seven calls to its server, each after the last: time in which no GPU would work. An
iteration does nothing until the manifest of the one before it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from prefect import Flow

from millrace.core.config import RunConfig
from millrace.core.errors import first_error
from millrace.core.garbage import collect_garbage


class Turn:
    """An iteration's place among the others."""

    def __init__(self, may_work: asyncio.Event) -> None:
        self._may_work = may_work
        self._next_may_begin = asyncio.Event()
        self._next_may_work = asyncio.Event()

    async def wait(self) -> None:
        """Until the iteration before is over."""
        await self._may_work.wait()

    def trained(self) -> None:
        """What is left of this iteration seldom fails and leaves the processors idle: the next one's flow run may begin."""
        self._next_may_begin.set()

    def over(self) -> None:
        """The manifest is written: the next iteration may work."""
        self._next_may_work.set()

    async def next(self) -> Turn:
        """The next iteration's turn, when its flow run may begin."""
        await self._next_may_begin.wait()
        return Turn(self._next_may_work)


mine: ContextVar[Turn] = ContextVar("mine")  # not a parameter of iterations, which Prefect keeps whole


async def in_turn(iteration: Flow[[int], object], config: RunConfig, first: int) -> None:
    """Run all iterations of the run from `first` on. Raises what the one that fails raises; the next then ends as well."""
    with the_first_of_several():
        async with asyncio.TaskGroup() as begun:
            nothing_before = asyncio.Event()
            nothing_before.set()
            turn = Turn(nothing_before)
            for index in range(first, config.run.iterations):
                mine.set(turn)  # the task's own: it gets a copy of what is set now
                named = iteration.with_options(flow_run_name=f"{config.run.name}-{index:06d}")
                begun.create_task(named(index))
                if index == first + 1:
                    await turn.wait()
                    collect_garbage()  # all is imported by now, and no weights are on their way
                turn = await turn.next()


@contextlib.contextmanager
def the_first_of_several() -> Iterator[None]:
    """Raise the first error of a task group by itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise first_error(group) from None
