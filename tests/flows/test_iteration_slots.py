"""Iterations follow one another: a flow run is created when the one before hands over, and works when that one is done."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow, task
from prefect._internal.result_records import ResultRecord
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, FlowRunFilterParentFlowRunId
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow_async
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.states import Suspended

from millrace.connectors.host import garbage
from millrace.connectors.prefect.record_storage import kept_at, save_record_storage
from millrace.core.config import RunConfig
from millrace.flows.driver.iteration_slots import (
    IterationSlot,
    Progress,
    Stage,
    begin_subflows,
    run_iterations,
)
from tests.support.flow_runs import Workplace

PATIENCE_S = 60
AT_MOST = 3  # iterations whose objects live: what Prefect starts in the first one keeps that one's


@pytest.fixture(autouse=True)
def server(workplace: Workplace) -> Iterator[None]:
    ours = {PREFECT_API_URL: workplace.api, PREFECT_API_AUTH_STRING: workplace.login}
    with temporary_settings({**ours, PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield


class Held:
    """What an iteration's task is given."""

    def __init__(self, number: int) -> None:
        self.number = number


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
        seen.append(f"{index} works")
        assert (gc.get_freeze_count() > 0) == (index > 0)  # collected between the first two, not amid a sync
        assert str(index + 2) not in await states("follow")
        await slot.reach(Stage.TRAINED)
        async with asyncio.timeout(PATIENCE_S):
            while index < 2 and (await states("follow")).get(str(index + 2)) != "Running":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        seen.append(f"{index} is done")

    await run_iterations(iteration, "iteration", run_named("follow"), 0)
    assert seen == [f"{index} {what}" for index in range(3) for what in ("works", "is done")]
    assert set((await states("follow")).values()) == {"Completed"}


@pytest.mark.parametrize("handed_over", [False, True])
async def test_what_fails_ends_the_run_by_its_own_error_and_nothing_works_after_it(handed_over: bool) -> None:
    name, worked = f"fails-{handed_over}".lower(), []

    async def iteration(index: int, slot: IterationSlot) -> None:
        worked.append(index)
        if handed_over:
            await slot.reach(Stage.TRAINED)
        if index == 1:
            raise ValueError("no")
        await slot.reach(Stage.TRAINED)

    with pytest.raises(ValueError, match="no"):
        await run_iterations(iteration, "iteration", run_named(name), 0)
    assert worked == [0, 1]
    found = await states(name)
    assert (found.pop("1"), found.pop("2")) == ("Completed", "Failed")
    assert found == {} or (handed_over and set(found.values()) <= {"Crashed", "Pending"})


@pytest.mark.parametrize("lowered", [(), (6,), (5, 8)], ids=["never", "once", "twice"])
@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_iterations_overlap_as_far_as_they_may(
    ahead: int, finish: bool, lowered: tuple[int, ...]
) -> None:
    """Whatever takes how long: at most L + 1 are open, and they draw, train, sync and publish in order.

    lowered: before these iterations draw, it is decided that they and those after them are one less ahead.
    """
    last, dice = 11, random.Random(ahead)
    progress, seen, decided = Progress(3), list[tuple[str, int]](), list[int]()

    def ahead_of(index: int) -> int:
        return max(0, ahead - sum(since <= index for since in decided))

    async def pause() -> None:
        for _ in range(dice.randrange(8)):
            await asyncio.sleep(0)

    async def work(index: int) -> None:
        slot = IterationSlot(index, progress, ahead=ahead_of, most=ahead, last=last, finish=finish)
        await slot.may_work()
        if index in lowered:
            decided.append(index)
        await slot.may_draw()
        seen.append(("open", index))
        await pause()
        seen.append(("draw", index))
        await slot.reach(Stage.DRAWN)
        await pause()
        async with asyncio.TaskGroup() as beside:
            beside.create_task(evaluate_in_background(slot))
            seen.append(("generate", index))
            await slot.reach(Stage.GENERATED)
            await slot.may_train()
            seen.append(("train", index))
            await pause()
            await slot.reach(Stage.TRAINED)
            await slot.may_sync()
        for wait, what, stage in (
            (pause, "sync", Stage.SERVED),
            (pause, "save", Stage.LEFT_TRAINER),
            (pause, "evaluate", Stage.LEFT_ENGINES),
            (slot.may_publish, "publish", Stage.DONE),
        ):
            await wait()
            seen.append((what, index))
            await pause()
            seen.append((f"end of {what}", index))
            await slot.reach(stage)

    async def evaluate_in_background(slot: IterationSlot) -> None:
        await slot.may_evaluate()
        seen.append(("background", slot.index))
        await pause()
        seen.append(("end of background", slot.index))

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for index in range(3, last + 1):
            group.create_task(work(index))
    at = {event: number for number, event in enumerate(seen)}
    for index in range(3, last + 1):
        for what in ("draw", "train", "sync", "publish"):
            assert index == 3 or at[what, index - 1] < at[what, index], what
        if (needed := index - ahead_of(index) - 1) >= 3:
            assert at["end of publish", needed] < at["open", index], "it opens when weights are served"
        assert index == 3 or at["evaluate", index - 1] < at["sync", index], "evaluated by one version"
        assert index == 3 or at["end of sync", index - 1] < at["background", index], "of the weights before"
        assert at["end of background", index] < at["sync", index], "and of no others"
        if finish:
            for later in range(index + 1, last + 1):
                if later - ahead_of(later) <= index:
                    assert at["generate", later] < at["sync", index], "generated by one version"
    opened = [sum(at["open", i] <= now < at["publish", i] for i in range(3, last + 1)) for now in at.values()]
    assert max(opened) <= ahead + 1
    assert lowered or max(opened) == ahead + 1


async def test_a_run_that_is_cancelled_ends_the_iteration_that_works() -> None:
    working, ended = asyncio.Event(), asyncio.Event()

    async def iteration(index: int, slot: IterationSlot) -> None:
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


async def test_what_lives_of_iterations_that_are_done_does_not_grow_with_them(tmp_path: Path) -> None:
    """Prefect held the results of the newest thousand tasks."""
    storage = await save_record_storage(str(tmp_path))
    contexts: weakref.WeakSet[Held] = weakref.WeakSet()

    @task
    async def work(context: Held) -> dict[str, int]:
        return {"number": context.number}

    async def iteration(index: int, slot: IterationSlot) -> None:
        context = Held(index)
        contexts.add(context)
        record = await kept_at(f"a/iterations/{index:06d}/results/work.json", work, storage)(context)
        assert record == {"number": index}
        await slot.reach(Stage.TRAINED)

    await run_iterations(iteration, "iteration", run_named("light", 3 * AT_MOST), 0)
    gc.unfreeze()  # what was frozen is not among the objects that follow
    gc.collect()
    assert len(list(tmp_path.glob("a/iterations/*/results/work.json"))) == 3 * AT_MOST
    results = [held.result for held in gc.get_objects() if type(held) is ResultRecord]
    assert len([result for result in results if isinstance(result, dict)]) <= AT_MOST
    assert len(contexts) <= AT_MOST


async def test_free_memory_is_given_back_now_and_then_while_no_iteration_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(garbage, "GIVE_BACK_EVERY", 2)
    monkeypatch.setattr(garbage, "give_back_memory", lambda: seen.append("given back"))

    async def iteration(index: int, slot: IterationSlot) -> None:
        await asyncio.sleep(0)
        seen.append(f"{index} works")
        await slot.reach(Stage.TRAINED)

    await run_iterations(iteration, "iteration", run_named("gives-back", 5), 0)
    worked = [index for index, what in enumerate(seen) if what.endswith("works")]
    assert len(worked) == 5
    assert seen.count("given back") == 2


@pytest.mark.slow
async def test_after_a_pause_no_iteration_goes_on_in_the_flow_run_of_another() -> None:
    """Prefect finds subflow runs by their order, and does not count a resumed flow run as run again."""
    starts = iter([(1, 0), (2, 1)])

    async def work(index: int, slot: IterationSlot) -> None:
        await slot.reach(Stage.LEFT_ENGINES)

    @flow(name="paused")
    async def paused() -> None:
        attempt, first = next(starts)
        begin_subflows(attempt)
        await run_iterations(work, "iteration", run_named("paused", 2 if attempt == 1 else 3), first)
        if attempt == 1:
            raise Pause(state=Suspended(timeout_seconds=300))

    async with get_client() as client:
        deployment = await client.create_deployment(await client.create_flow(paused), "paused")
        made = await client.create_flow_run_from_deployment(deployment)  # Prefect pauses no others
        with pytest.raises(Pause):
            await run_flow_async(paused, flow_run=made)
        await client.set_flow_run_state(made.id, Suspended(timeout_seconds=300), force=True)
        await client.resume_flow_run(made.id)
        await run_flow_async(paused, flow_run=await client.read_flow_run(made.id))
        parent = FlowRunFilterParentFlowRunId(any_=[made.id])
        runs = await client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))
    ends = sorted(run.name.removeprefix("paused, iteration ") for run in runs)
    assert ends == ["1", "2", "2", "3"]
