"""Two shards and their driver in one process: shares, restarts, lost engines. test_shards.py of flows has the same with Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.storage.lease import Lease, take_over
from millrace.connectors.storage.parts import list_parts, read_parts, write_part
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.accounts.staleness import Ahead, VersionRange
from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id
from millrace.core.errors import ActorLostError, BudgetError, EngineError
from millrace.tasks.shards.board import ShardCall, ShardReplacedError
from millrace.tasks.shards.driver import ShardedIteration
from tests.support.local_board import LocalBoard
from tests.support.shards_here import GROUPS, SAMPLES, VERSION, Engine, Place, rows, until
from tests.support.stored_samples import drawn_group, sample_of

EVERY = {sample_id(f"g{group}", index) for group in range(GROUPS - 1) for index in range(SAMPLES)}

pytestmark = pytest.mark.timeout(60)


async def test_each_sample_of_what_is_released_is_made_by_one_shard(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards()
    record = await place.rollout(place.ctx, len(EVERY))
    assert place.stored() == Counter(EVERY)
    asked = engines[0][0].asked + engines[0][1].asked
    assert asked == Counter(EVERY)
    assert record["samples_generated"] == record["tokens_generated"] == len(EVERY)
    assert sorted(file["path"] for file in record["files"]) == list_parts(place.ctx.folder, "rollouts")
    assert place.starts == {0: 1, 1: 1}


async def test_a_start_after_a_kill_generates_what_no_part_holds(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards()
    for engine in engines[0]:
        engine.hold = asyncio.Event()
    few = asyncio.create_task(place.rollout(place.ctx, 10_000))
    await until(lambda: sum(place.stored().values()) >= 3 * (GROUPS - 1))
    few.cancel()
    await asyncio.gather(few, return_exceptions=True)
    for engine in engines[0]:
        engine.let_go()
    record = await place.rollout(place.context(), len(EVERY))
    assert place.stored() == Counter(EVERY)
    assert record["samples_found"] == 3 * (GROUPS - 1)
    assert record["samples_generated"] == GROUPS - 1


async def test_a_shard_that_dies_is_started_again_and_finds_its_parts(
    make_shards: Callable[..., Place],
    engines: tuple[list[Engine], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = make_shards()
    for engine in engines[0]:
        engine.hold = asyncio.Event()
    place.dies = lambda call: call.attempt.shard == 0 and place.starts[0] == 1
    working = asyncio.create_task(place.rollout(place.ctx, len(EVERY)))
    await until(lambda: place.starts[0] == 2)
    for engine in engines[0]:
        engine.let_go()
    await working
    assert place.stored() == Counter(EVERY)
    assert place.starts == {0: 2, 1: 1}
    assert "shard 0 of rollout: its process died; starting it again" in caplog.text


async def test_a_part_of_a_dead_shard_that_shows_after_its_samples_were_made_again_counts_for_no_later_driver(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place, first = make_shards(), list[int]()
    for engine in engines[0]:
        engine.hold = asyncio.Event()

    def dies(call: ShardCall) -> bool:
        first.append(call.attempt.number)
        return call.attempt.shard == 0 and place.starts[0] == 1

    place.dies = dies
    working = asyncio.create_task(place.rollout(place.ctx, len(EVERY)))
    await until(lambda: place.starts[0] == 2)
    for engine in engines[0]:
        engine.let_go()
    await working
    unseen = place.context().folder
    unseen.attempt = min(first)  # of shard 0, which was started first
    row = sample_of(drawn_group(0), 0, "another answer")
    write_part(unseen, "rollouts", schema.to_table([row], "rollouts"), "rollouts")
    run = RunFolder(place.config.storage.root, place.config.run.name)
    assert isinstance(place.runtime.run_folder.store.fence, Lease)
    place.runtime.run_folder.store.fence.release()
    run.store.fence = Lease.take(run.store)
    take_over(run)
    assert place.stored() == Counter(EVERY)


async def test_a_shard_that_dies_again_and_again_ends_the_task(make_shards: Callable[..., Place]) -> None:
    place = make_shards()

    async def dead(*_: Any) -> Any:
        raise ActorLostError("its process died")

    place.ctx = place.ctx.working_in(ShardedIteration(place.ctx, dead))
    with pytest.raises(ActorLostError, match="its task was tried 3 times"):
        await place.rollout(place.ctx, len(EVERY))


async def test_an_engine_that_loses_a_request_is_reported_and_the_sample_made_elsewhere(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards()
    engines[0][0].broken = True

    async def repaired() -> None:
        await until(lambda: bool(place.lost))
        engines[0][0].broken = False

    repairing = asyncio.create_task(repaired())
    await place.rollout(place.ctx, len(EVERY))
    await repairing
    assert set(place.lost) == {"engine-0"}
    assert place.stored() == Counter(EVERY)


async def test_a_shard_generates_by_the_versions_that_the_driver_allows_though_they_changed_in_its_course(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards(pipeline={"ahead": 1, "on_update": "finish"})
    place.runtime.prompts.use_ahead(Ahead(((0, 1),)))
    for engine in engines[0]:
        engine.version = VERSION - place.config.steps_per_iteration
    await place.rollout(place.ctx, len(EVERY))
    rows = read_parts(place.ctx.folder, "rollouts", "rollouts").to_pylist()
    made_by = {span["version"] for row in rows for span in row["policy_versions"]}
    assert made_by == {VERSION - place.config.steps_per_iteration}


async def test_samples_that_fail_are_counted_over_all_shards(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    place = make_shards(rollout={"max_failed_share": 0.1})  # of 20 samples 2
    for engine in engines[0]:
        engine.fails = lambda rid: rid in {"g0-0000", "g1-0000", "g2-0000"}
    with pytest.raises(BudgetError, match="3 samples failed to generate"):
        await place.rollout(place.ctx, 10_000)


async def test_engines_that_cannot_be_made_ready_fail_the_samples_with_the_reason(
    make_shards: Callable[..., Place],
) -> None:
    place = make_shards(rollout={"max_failed_share": 0.01})

    async def none(_: VersionRange) -> Dispatcher:
        raise EngineError("engine-0 does not start")

    ctx = place.ctx
    ctx.engines_at = none  # type: ignore[method-assign]
    with pytest.raises(BudgetError, match="engine-0 does not start"):
        await place.rollout(ctx.working_in(ShardedIteration(ctx, place.run_shard)), 10_000)


async def test_rewards_of_all_shards_are_one_record(make_shards: Callable[..., Place]) -> None:
    place = make_shards(reward={"workers": 1})
    ctx = place.ctx
    await place.rollout(ctx, len(EVERY))
    again = place.context()
    assert again.shards is not None
    scoring = asyncio.create_task(again.shards.reward())
    await until(lambda: rows(again, "rewards") >= len(EVERY) or scoring.done())
    await again.stream.settle()
    record = await scoring
    assert record["scored"] == len(EVERY)
    scored = read_parts(ctx.folder, "rewards", "rewards").column("sample_id").to_pylist()
    assert Counter(scored) == Counter(EVERY)
    await cast(ShardedIteration, again.shards).close()


async def test_a_shard_that_starts_late_counts_for_no_board_that_was_made_since(
    make_shards: Callable[..., Place], engines: tuple[list[Engine], list[str]]
) -> None:
    """It took itself for the attempt of its number there, and both generated the same samples."""
    place, calls = make_shards(), list[ShardCall]()

    async def noted(task: Any, call: ShardCall, node: str | None) -> Any:
        calls.append(call)
        return await place.run_shard(task, call, node)

    place.ctx = place.ctx.working_in(ShardedIteration(place.ctx, noted))
    await place.rollout(place.ctx, len(EVERY))
    cast(Any, place.actor).board = made_since = LocalBoard().board
    made_since.serve(place.facts)
    again = place.context()
    again.shards = ShardedIteration(again, noted)
    working = asyncio.create_task(again.shards.rollout())
    await until(lambda: len(calls) == 4)
    with pytest.raises(ShardReplacedError, match="does not wait for this attempt"):
        await place._work("rollout_shard", calls[0])
    await again.stream.settle()
    await working
    await again.shards.close()
    assert place.stored() == Counter(EVERY)
    assert len({call.attempt.number for call in calls}) == 4
