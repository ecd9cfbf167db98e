"""An evaluation in two shards and their driver, in one process: what the driver makes alone. test_shards.py of flows has the same
with Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from millrace.connectors.storage.parts import read_parts
from millrace.core.contracts.rows.prompts import PromptRow
from millrace.core.errors import BudgetError
from millrace.tasks.context import IterationContext
from millrace.tasks.data.prompt_dataset import PromptSet
from millrace.tasks.data.rows import UsablePrompt
from millrace.tasks.evaluate import evaluate_before
from millrace.tasks.generation.held_out import PROMPTS
from millrace.tasks.shards.board import Attempt
from millrace.tasks.shards.driver import ShardedEvaluation
from tests.support.shards_here import VERSION, Engine, Place, until

pytestmark = pytest.mark.timeout(60)
SETS = [
    {"name": "sums", "path": "sums.jsonl", "samples_per_prompt": 4, "subset_key": "of"},
    {"name": "more", "path": "more.jsonl", "samples_per_prompt": 2},
]
HELD_OUT = {
    "sums": [
        PromptRow("sums", n, f"p{n}", f"{n}+1=", label, {"of": f"half {n % 2}"})
        for n, label in enumerate(["2", "x", "2", "2", "2"])
    ],
    "more": [PromptRow("more", 0, "q0", [{"role": "user", "content": "Größe?"}], ["2", "3"])],
}
EVERY = {f"eval-{VERSION}-p{n}-{index}" for n in range(5) for index in range(4)} | {
    f"eval-{VERSION}-q0-{index}" for index in range(2)
}
Engines = tuple[list[Engine], list[str]]
MakeShards = Callable[..., Place]


def place_of(make_shards: MakeShards, **sections: Any) -> Place:
    """The driver alone has read the held-out sets: a shard has neither their files nor a tokenizer."""
    found = make_shards(evaluation={"sets": SETS}, reward={"workers": 1}, **sections)
    for held_out in found.config.evaluation.sets:
        usable = [UsablePrompt(row, [row.row, 7]) for row in HELD_OUT[held_out.name]]
        found.runtime.prompts._held_out[held_out.name] = PromptSet(held_out, usable)
    return found


def in_shards(place: Place) -> IterationContext:
    ctx = place.context()
    return ctx.working_in(evaluation_shards=ShardedEvaluation(ctx, place.run_shard))


def stored(ctx: IterationContext) -> Counter[str]:
    rows = read_parts(ctx.folder, "evaluations", "evaluations").to_pylist()
    return Counter(f"eval-{row['version']}-{row['prompt_id']}-{row['index']}" for row in rows)


def tables(ctx: IterationContext) -> dict[str, Any]:
    store = ctx.run_folder.store
    return {
        name: store.read_table(f"eval/{name}/{ctx.index:06d}.parquet", "evaluations").to_pylist()
        for name in HELD_OUT
    }


def asked(engines: Engines) -> Counter[str]:
    return engines[0][0].asked + engines[0][1].asked


def figures(record: Any) -> dict[str, Any]:
    return {name: {**found, "file": None} for name, found in record["sets"].items()}


async def test_rows_and_figures_are_those_that_the_driver_makes_alone(
    make_shards: MakeShards, engines: Engines
) -> None:
    place = place_of(make_shards)
    ctx = in_shards(place)
    record = await evaluate_before.fn(ctx)
    assert stored(ctx) == asked(engines) == Counter(EVERY)
    assert place.starts == {0: 1, 1: 1}
    assert sorted(file["path"] for file in record["files"]) == sorted(ctx.folder.list("evaluations"))
    assert not ctx.folder.exists(PROMPTS)
    made = tables(ctx), figures(record)
    for path in ctx.folder.list("evaluations"):
        ctx.folder.remove(path)
    alone = place.context()
    again = await evaluate_before.fn(alone)
    assert (tables(alone), figures(again)) == made
    assert record["sets"]["sums"]["subsets"].keys() == {"half 0", "half 1"}


async def test_a_shard_that_dies_is_started_again_and_makes_what_no_part_holds(
    make_shards: MakeShards, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    place = place_of(make_shards)
    for engine in engines[0]:
        engine.hold, engine.holds = asyncio.Event(), lambda rid: rid.endswith("-3")
    place.dies = lambda call: call.attempt == Attempt("evaluate", 0, 1)
    ctx = in_shards(place)
    working = asyncio.create_task(evaluate_before.fn(ctx))
    await until(lambda: place.starts[0] == 2 or working.done())
    finished = stored(ctx)
    for engine in engines[0]:
        engine.let_go()
    record = await working
    assert finished
    assert {rid: asked(engines)[rid] for rid in finished} == dict(finished)
    assert stored(ctx) == Counter(EVERY)
    assert record["sets"]["sums"]["samples"] == 20
    assert "shard 0 of evaluate: its process died; starting it again" in caplog.text


async def test_a_start_after_a_kill_makes_what_no_part_holds(
    make_shards: MakeShards, engines: Engines
) -> None:
    place = place_of(make_shards)
    for engine in engines[0]:
        engine.hold, engine.holds = asyncio.Event(), lambda rid: rid.endswith("-3")
    ctx = in_shards(place)
    killed = asyncio.create_task(evaluate_before.fn(ctx))
    await until(lambda: len(stored(ctx)) >= 15 or killed.done())
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    for engine in engines[0]:
        engine.let_go()
    finished = stored(ctx)
    again = in_shards(place)
    record = await evaluate_before.fn(again)
    assert record["sets"]["sums"]["samples"] == 20
    assert {rid: asked(engines)[rid] for rid in finished} == dict(finished)
    assert stored(again) == Counter(EVERY)
    third = in_shards(place)
    starts = dict(place.starts)
    assert figures(await evaluate_before.fn(third)) == figures(record)
    assert place.starts == starts, "nothing is due, and no shard is started"


async def test_a_sample_that_fails_within_the_budget_is_counted_and_made_again_at_the_next_start(
    make_shards: MakeShards, engines: Engines
) -> None:
    place = place_of(make_shards)
    for engine in engines[0]:
        engine.fails = lambda rid: rid == f"eval-{VERSION}-p3-1"
    record = await evaluate_before.fn(in_shards(place))
    assert (record["sets"]["sums"]["failed"], record["sets"]["sums"]["not_scored"]) == (1, 1)
    for engine in engines[0]:
        engine.fails = lambda _: False
    again = await evaluate_before.fn(in_shards(place))
    assert (again["sets"]["sums"]["failed"], again["sets"]["sums"]["not_scored"]) == (0, 0)
    assert asked(engines) == Counter(EVERY)


async def test_samples_that_fail_are_counted_over_all_shards_and_the_set_is_named(
    make_shards: MakeShards, engines: Engines
) -> None:
    place = place_of(make_shards, rollout={"max_failed_share": 0.1})  # of 20 samples 2
    for engine in engines[0]:
        engine.fails = lambda rid: rid in {f"eval-{VERSION}-p{n}-0" for n in range(3)}
    with pytest.raises(
        BudgetError, match="evaluation of sums after 1 iterations: 3 samples failed to generate"
    ):
        await evaluate_before.fn(in_shards(place))
