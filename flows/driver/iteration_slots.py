"""Iterations one after the other, each a flow run of its own that is created before the one before it ends.

Prefect creates a flow run by seven calls to its server, one after the other. No GPU works meanwhile unless they are made
while the iteration before still hands over its weights. Knows nothing of what an iteration does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prefect import Flow

from millrace.core.config import RunConfig
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import only_first_error
from millrace.core.garbage import collect_garbage, give_back_memory

GIVE_BACK_EVERY = 20  # iterations


class IterationSlot:
    """One iteration's place in the sequence.

    `may_work` returns when the manifest of the iteration before is written, at once for the first one.
    `hand_over` says that training is done. The next flow run is created now, while this iteration's CPU is idle.
    `done` says that the manifest is written. The next iteration begins to work.

    Guarantees: at most one iteration works at a time; no flow run is created before `hand_over` of the one before it; after
    an iteration that fails no other one works.

        async def iteration(runtime: Runtime, index: int, slot: IterationSlot) -> None:
            await slot.may_work()
            ...  # sample, generate, train
            slot.hand_over()
            ...  # sync weights, save, publish
            slot.done()
    """

    def __init__(self, before: IterationSlot | None = None) -> None:
        self._before: asyncio.Event | None = before._done if before else None
        self._handed_over = asyncio.Event()
        self._done: asyncio.Event = asyncio.Event()

    async def may_work(self) -> None:
        """Wait until the iteration before is done."""
        if self._before:
            await self._before.wait()

    def hand_over(self) -> None:
        """Let the next iteration's flow run be created: what is left of this one seldom fails."""
        self._handed_over.set()

    def done(self) -> None:
        """Let the next iteration work."""
        self._done.set()

    async def next(self) -> IterationSlot:
        """Wait for `hand_over` and return the next iteration's slot. Called by the driver alone."""
        await self._handed_over.wait()
        return IterationSlot(self)


Work = Callable[[int, IterationSlot], Coroutine[Any, Any, None]]


async def run_iterations(work: Work, flow_name: str, config: RunConfig, first: int) -> None:
    """Run every iteration of the run from index `first` on, each as a flow run of the flow `flow_name`.

    Raises the error of the iteration that fails; a flow run created after it ends too, with nothing done.
    """
    with only_first_error():
        async with asyncio.TaskGroup() as group:
            slot = IterationSlot()
            for index in range(first, config.run.iterations):
                run_name = f"{config.run.name}, iteration {iteration_number(index)}"
                group.create_task(_flow(work, slot, flow_name, run_name)(index))
                if index == first + 1:
                    await slot.may_work()
                    collect_garbage()  # every module is imported by now, and no weights are being sent
                elif index > first and (index - first) % GIVE_BACK_EVERY == 0:
                    await slot.may_work()
                    give_back_memory()
                slot = await slot.next()


def _flow(
    work: Work, slot: IterationSlot, name: str, run_name: str
) -> Flow[[int], Coroutine[Any, Any, None]]:
    """One iteration as a Prefect flow whose only parameter is the index.

    Prefect serialises a flow's parameters and keeps them whole with the flow run, which a slot and a runtime cannot be:
    they are bound here instead.
    """

    async def iteration(index: int) -> None:
        await work(index, slot)

    return Flow(iteration, name=name, flow_run_name=run_name)
