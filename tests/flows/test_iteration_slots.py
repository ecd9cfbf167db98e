"""Iterations follow one another; a flow run begins when the one before it has trained, and does nothing till that is over."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from millrace.core.config import RunConfig
from millrace.flows.iteration_slots import in_turn, mine
from tests.support.flow_runs import Workplace

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def server(workplace: Workplace) -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: workplace.api, PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield


def run_named(name: str, iterations: int = 3) -> RunConfig:
    run = {"name": name, "iterations": iterations}
    return RunConfig.model_validate(
        {"run": run, "model": {"path": "m"}, "data": {"sources": [{"path": "p"}]}}
    )


async def states(name: str) -> dict[str, str]:
    """Of each of the run's flow runs, by the end of its name."""
    async with get_client() as client:
        named = FlowRunFilter(name=FlowRunFilterName(like_=f"{name}-0000"))
        runs = await client.read_flow_runs(flow_run_filter=named)
    return {run.name.removeprefix(f"{name}-0000"): str(run.state_name) for run in runs}


async def test_the_next_flow_run_begins_when_one_has_trained_and_works_when_that_is_over() -> None:
    seen: list[str] = []
    gc.unfreeze()

    @flow
    async def iteration(index: int) -> None:
        turn = mine.get()
        await turn.wait()
        seen.append(f"{index} works")
        assert (gc.get_freeze_count() > 0) == (index > 0)  # collected between the first two, not amid a sync
        assert f"{index + 1:02d}" not in await states("follow")
        turn.trained()
        async with asyncio.timeout(PATIENCE_S):
            while index < 2 and (await states("follow")).get(f"{index + 1:02d}") != "Running":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        seen.append(f"{index} is over")
        turn.over()

    await in_turn(iteration, run_named("follow"), 0)
    assert seen == [f"{index} {what}" for index in range(3) for what in ("works", "is over")]
    assert set((await states("follow")).values()) == {"Completed"}


@pytest.mark.parametrize("trained", [False, True])
async def test_what_fails_ends_the_run_by_its_own_error_and_nothing_works_after_it(trained: bool) -> None:
    name, worked = f"fails-{trained}".lower(), []

    @flow
    async def iteration(index: int) -> None:
        turn = mine.get()
        await turn.wait()
        worked.append(index)
        if trained:
            turn.trained()
        if index == 1:
            raise ValueError("no")
        turn.trained()
        turn.over()

    with pytest.raises(ValueError, match="no"):
        await in_turn(iteration, run_named(name), 0)
    assert worked == [0, 1]
    found = await states(name)
    assert (found.pop("00"), found.pop("01")) == ("Completed", "Failed")
    assert found == {} or (trained and set(found.values()) <= {"Crashed", "Pending"})


async def test_a_run_that_is_cancelled_ends_the_iteration_that_works() -> None:
    working, ended = asyncio.Event(), asyncio.Event()

    @flow
    async def iteration(index: int) -> None:
        await mine.get().wait()
        working.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            ended.set()

    running = asyncio.create_task(in_turn(iteration, run_named("cancelled"), 0))
    await working.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
