"""Iterations follow one another: a flow run is created when the one before hands over, and works when that one is done."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)

from millrace.core.config import RunConfig
from millrace.flows.driver.iteration_slots import IterationSlot, run_iterations
from tests.support.flow_runs import Workplace

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def server(workplace: Workplace) -> Iterator[None]:
    ours = {PREFECT_API_URL: workplace.api, PREFECT_API_AUTH_STRING: workplace.login}
    with temporary_settings({**ours, PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield


def run_named(name: str, iterations: int = 3) -> RunConfig:
    run = {"name": name, "iterations": iterations}
    return RunConfig.model_validate(
        {"run": run, "model": {"path": "m"}, "data": {"sources": [{"path": "p"}]}}
    )


async def states(name: str) -> dict[str, str]:
    """Of each of the run's flow runs, by the end of its name."""
    async with get_client() as client:
        named = FlowRunFilter(name=FlowRunFilterName(like_=f"{name}, iteration "))
        runs = await client.read_flow_runs(flow_run_filter=named)
    return {run.name.removeprefix(f"{name}, iteration "): str(run.state_name) for run in runs}


async def test_the_next_flow_run_is_created_at_the_hand_over_and_works_when_the_iteration_is_done() -> None:
    seen: list[str] = []
    gc.unfreeze()

    async def iteration(index: int, slot: IterationSlot) -> None:
        await slot.may_work()
        seen.append(f"{index} works")
        assert (gc.get_freeze_count() > 0) == (index > 0)  # collected between the first two, not amid a sync
        assert str(index + 2) not in await states("follow")
        slot.hand_over()
        async with asyncio.timeout(PATIENCE_S):
            while index < 2 and (await states("follow")).get(str(index + 2)) != "Running":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        seen.append(f"{index} is done")
        slot.done()

    await run_iterations(iteration, "iteration", run_named("follow"), 0)
    assert seen == [f"{index} {what}" for index in range(3) for what in ("works", "is done")]
    assert set((await states("follow")).values()) == {"Completed"}


@pytest.mark.parametrize("handed_over", [False, True])
async def test_what_fails_ends_the_run_by_its_own_error_and_nothing_works_after_it(handed_over: bool) -> None:
    name, worked = f"fails-{handed_over}".lower(), []

    async def iteration(index: int, slot: IterationSlot) -> None:
        await slot.may_work()
        worked.append(index)
        if handed_over:
            slot.hand_over()
        if index == 1:
            raise ValueError("no")
        slot.hand_over()
        slot.done()

    with pytest.raises(ValueError, match="no"):
        await run_iterations(iteration, "iteration", run_named(name), 0)
    assert worked == [0, 1]
    found = await states(name)
    assert (found.pop("1"), found.pop("2")) == ("Completed", "Failed")
    assert found == {} or (handed_over and set(found.values()) <= {"Crashed", "Pending"})


async def test_a_run_that_is_cancelled_ends_the_iteration_that_works() -> None:
    working, ended = asyncio.Event(), asyncio.Event()

    async def iteration(index: int, slot: IterationSlot) -> None:
        await slot.may_work()
        working.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            ended.set()

    running = asyncio.create_task(run_iterations(iteration, "iteration", run_named("cancelled"), 0))
    await working.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
