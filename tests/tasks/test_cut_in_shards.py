"""Answers that a cut ends in shards: stored there, deferred by the driver, and gone on with by the shards of the next iteration."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.run_folder import CUT, DEFERRED
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.task_records import Cut
from millrace.tasks.batching.deferred_groups import UNFINISHED, join
from millrace.tasks.context import IterationContext
from millrace.tasks.shards.driver import ShardedIteration
from tests.support.shards_here import GROUPS, INDEX, PARTIAL, SAMPLES, Engine, Place, rows, until

FINISH = {"select": "finish", "reserve": 0.5, "max_staleness": 1}
DEFERRED_GROUPS = {"g3": 1, "g4": 1}  # one of each shard
THE_CUT = Cut(trained=["g0", "g1"], deferred=DEFERRED_GROUPS, returned=["g2"], parts=[])
NOTHING_DEFERRED = Cut(trained=["g6"], deferred={}, returned=[], parts=[])
HELD = {sample_id(group, SAMPLES - 1) for group in ("g2", *DEFERRED_GROUPS)}
Engines = tuple[list[Engine], list[str]]

pytestmark = pytest.mark.timeout(60)


def commit(ctx: IterationContext, cut: Cut) -> None:
    place = f"{ctx.run_folder.iteration_path(ctx.index)}/{CUT}"
    ctx.folder.write_sealed(CUT, cut.model_dump(), place, ctx.run_folder.owner.run_id)


async def roll_out_to_the_cut(place: Place, engines: list[Engine]) -> Any:
    """The record of a rollout in which all but the last samples of three groups finish before the cut."""
    for engine in engines:
        engine.hold, engine.holds = asyncio.Event(), HELD.__contains__
    whole = (GROUPS - 1) * SAMPLES - len(HELD)
    working = asyncio.create_task(place.rollout(place.ctx, whole))
    await until(lambda: sum(sum(engine.asked.values()) for engine in engines) == whole + len(HELD))
    commit(place.ctx, THE_CUT)
    return await working


def by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["sample_id"]: row for row in rows}


async def test_what_a_cut_ends_in_a_shard_is_stored_there_and_deferred_by_the_driver(
    make_shards: Callable[..., Place], engines: Engines
) -> None:
    place = make_shards(pipeline=FINISH)
    record = await roll_out_to_the_cut(place, engines[0])
    assert {CUT, DEFERRED} < {file["path"] for file in record["files"]}
    deferred = by_id(place.ctx.folder.read_table(DEFERRED, "rollouts").to_pylist())
    assert set(deferred) == {sample_id(g, n) for g in DEFERRED_GROUPS for n in range(SAMPLES)}
    ended = {sample for sample, row in deferred.items() if row["status"] == UNFINISHED}
    assert ended == {sample_id(group, SAMPLES - 1) for group in DEFERRED_GROUPS}
    for sample in ended:
        row = deferred[sample]
        assert row["tokens"] == [1, 2, *PARTIAL]
        assert row["rollout_logprobs"] == [-0.25] * len(PARTIAL)
        assert row["policy_versions"] == [{"first_token": 0, "version": 1}]
        assert row["engine_id"] in ("engine-0", "engine-1")
    assert not ended & set(place.stored())  # they are no samples of this iteration


async def test_what_a_group_that_is_given_back_had_begun_is_not_stored(
    make_shards: Callable[..., Place], engines: Engines
) -> None:
    place = make_shards(pipeline=FINISH)
    await roll_out_to_the_cut(place, engines[0])
    turns = read_parts(place.ctx.folder, "turns", "turns").to_pylist()
    assert {row["group_id"] for row in turns} == set(DEFERRED_GROUPS)


async def test_the_next_iterations_shards_go_on_with_what_was_deferred_and_score_all_of_it(
    make_shards: Callable[..., Place], engines: Engines
) -> None:
    place = make_shards(pipeline=FINISH, reward={"workers": 1})
    record = await roll_out_to_the_cut(place, engines[0])
    prompts = [place.ctx.folder.entry("prompts.parquet").record()]
    for task, files in {"sample_prompts": prompts, "reward": [], "rollout": record["files"]}.items():
        place.ctx.folder.write_sealed(record_path(task), {"result": json.dumps({"files": files})})
    for engine in engines[0]:
        engine.let_go()
        engine.version = 2
        engine.asked.clear()
    after = place.context(INDEX + 1, joined=None)
    assert after.shards is not None
    every = {sample_id(f"g{number}", n) for number in range(6, 11) for n in range(SAMPLES)}
    every |= {sample_id(group, n) for group in DEFERRED_GROUPS for n in range(SAMPLES)}
    works = [asyncio.create_task(work) for work in (after.shards.rollout(), after.shards.reward())]
    try:
        await until(lambda: rows(after, "rollouts") >= len(every) - 2 * SAMPLES)  # those of its own draw
        assert not any(row.startswith(tuple(DEFERRED_GROUPS)) for row in place.stored(after))
        joined = await asyncio.to_thread(join, after)
        await after.stream.join(joined)
        await until(lambda: rows(after, "rewards") >= len(every) or any(w.done() for w in works))
        commit(after, NOTHING_DEFERRED)
        await after.stream.settle()
        rollout, reward = await asyncio.gather(*works)
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        await cast(ShardedIteration, after.shards).close()
    assert place.stored(after) == Counter(every)
    assert reward["scored"] == len(every)
    assert rollout["samples_generated"] == len(every) - 2 * (
        SAMPLES - 1
    )  # of each group all but one were whole
    for group in DEFERRED_GROUPS:
        sample = sample_id(group, SAMPLES - 1)
        assert next(e.given[sample] for e in engines[0] if e.asked[sample]) == [1, 2, *PARTIAL]
        row = by_id(read_parts(after.folder, "rollouts", "rollouts").to_pylist())[sample]
        assert row["tokens"] == [1, 2, *PARTIAL, 5]
        assert [span["version"] for span in row["policy_versions"]] == [1, 2]
