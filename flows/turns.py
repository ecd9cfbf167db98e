"""Iterations one after the other, each a flow run of its own, which begins while the one before it is published.

To begin a flow run takes Prefect seven calls to its server, each after the last: time in which no GPU works. An
iteration does nothing until the manifest of the one before it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from prefect import Flow

from core.config import RunConfig
from core.garbage import collect_garbage


class Turn:
    """An iteration's: it waits for the one before, says when it publishes and when its manifest is written."""

    def __init__(self, before: Turn | None) -> None:
        self._before = before
        self._publishing = asyncio.Event()
        self._published = asyncio.Event()

    async def wait(self) -> None:
        """Until the iteration before has written its manifest."""
        if self._before is not None:
            await self._before._published.wait()
            self._before = None

    async def nearly_over(self) -> None:
        """Until this iteration has nothing left to do but to publish."""
        await self._publishing.wait()

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Around what writes the manifest: within, the next iteration's flow run begins; after it, that iteration works."""
        self._publishing.set()
        yield
        self._published.set()


mine: ContextVar[Turn] = ContextVar("mine")  # not a parameter of iterations, which Prefect keeps whole


async def in_turn(iteration: Flow[[int], object], config: RunConfig, first: int) -> None:
    """Run all iterations of the run from `first` on. Raises what the one that fails raises; the next then ends as well."""
    with the_first_of_several():
        async with asyncio.TaskGroup() as begun:
            turn = None
            for index in range(first, config.run.iterations):
                turn = Turn(turn)
                mine.set(turn)  # the task's own: it gets a copy of what is set now
                named = iteration.with_options(flow_run_name=f"{config.run.name}-{index:06d}")
                begun.create_task(named(index))
                await turn.nearly_over()
                if index == first + 1:  # all is imported by now
                    collect_garbage()


@contextlib.contextmanager
def the_first_of_several() -> Iterator[None]:
    """Raise the first error of a task group by itself: it is what made the others end."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
