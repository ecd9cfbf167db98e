"""Tasks that wait for each other's parts end with a typed error where the one that was to make them is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Failed

from millrace.core.config import RunConfig
from millrace.core.errors import ActorLostError, ActorStalledError, BudgetError, StalledError
from millrace.core.waits import Limit, beat
from millrace.flows.driver.iteration_slots import Progress, Stage
from millrace.flows.driver.run_record import record_verdict
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.part_writer import PartWriter
from millrace.tasks.reward import reward
from millrace.tasks.run_recorded import may_help
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Stream

SHORT = Limit(0.2)
PATIENCE_S = 20.0


async def test_the_reward_task_ends_where_the_rollout_is_gone(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    ctx = IterationContext(Runtime(config), 0, Stream(2, limit=SHORT))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StalledError, match=r"parts of samples and of rewards: nothing moved for 0\.2 s"):
            await reward.fn(ctx)


async def test_parts_that_land_and_work_elsewhere_in_the_run_keep_a_task_waiting() -> None:
    stream = Stream(2, limit=SHORT)
    revision, waiting = stream.revision, asyncio.create_task(stream.wait(0))
    for _ in range(20):
        await asyncio.sleep(SHORT.seconds / 8)
        beat()  # a sample of another group is scored
    assert not waiting.done()
    await stream.land("rollouts", "part-0")
    assert await waiting == revision + 1


async def test_what_the_iteration_before_defers_is_not_awaited_for_ever() -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StalledError, match="what the iteration before defers"):
            await Stream(2, joined=None, limit=SHORT).until_joined()


async def test_a_rollout_that_never_begins_is_not_awaited_for_ever() -> None:
    stream = Stream(2, limit=SHORT)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StalledError, match="the beginning of the rollout"):
            await stream.until_begun()
    await stream.begin()
    await stream.until_begun()


async def test_an_iteration_that_waits_for_one_that_is_gone_names_it_and_how_far_it_was_to_be() -> None:
    progress = Progress(3, SHORT)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StalledError, match="iteration 4 until it is left trainer: nothing moved"):
            await progress.wait(3, Stage.LEFT_TRAINER)
    await progress.reach(3, Stage.DONE)
    await progress.wait(3, Stage.LEFT_TRAINER)


async def test_rows_that_nobody_writes_are_not_awaited_for_ever(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config()

    class Short(RunConfig):
        @property
        def run_limit(self) -> Limit:
            return SHORT

    ctx: Any = SimpleNamespace(config=Short.model_validate(config.model_dump()))

    async def landed(_: Any) -> None:
        raise AssertionError("nothing is written")

    writer = PartWriter(ctx, "turns", 1, lambda: False, landed)
    writer.put([{}])
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StalledError, match="parts of turns to be stored"):
            await writer.settled()


@pytest.mark.parametrize(
    ("error", "runs", "again"),
    [
        (StalledError("why"), 1, True),
        (StalledError("why"), 2, False),
        (ActorStalledError("why"), 1, True),
        (ActorStalledError("why"), 2, False),
        (ActorLostError("why"), 2, True),
        (ExceptionGroup("", [StalledError("why"), BudgetError("spent")]), 1, False),
        (ExceptionGroup("", [StalledError("why")]), 2, False),
    ],
)
def test_what_stood_still_is_built_again_once(error: Exception, runs: int, *, again: bool) -> None:
    assert may_help(None, SimpleNamespace(run_count=runs), Failed(data=error)) is again


async def test_the_verdict_is_kept_with_the_attempt_that_it_ended(
    make_config: Callable[..., RunConfig],
) -> None:
    runtime = Runtime(make_config())
    store = runtime.run_folder.store
    store.write_sealed("run.json", {"name": "a", "attempts": [{"number": 1}, {"number": 2}]})
    await record_verdict(runtime, ActorStalledError("nothing moved for 2 s", where="train of trainer-0"))
    first, last = store.read_sealed("run.json")["attempts"]
    assert first == {"number": 1}
    assert (
        last.pop("stalled").items()
        >= {
            "error": "ActorStalledError",
            "waited_for": "train of trainer-0",
            "reason": "nothing moved for 2 s",
        }.items()
    )
    assert last == {"number": 2}


def test_the_runs_own_limit_is_longer_than_any_part_may_be_silent(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config(run={"progress_timeout_s": 100}, rollout={"progress_timeout_s": 50, "attempts": 2})
    assert config.part_limit == Limit(100)
    assert config.run_limit.seconds > 100 * 1.25 + 2 * 50 * 1.25 + config.engines.start_timeout_s
