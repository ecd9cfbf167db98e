"""Samples of rollout and evaluate: what an engine is asked, and what becomes of samples that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millrace.connectors.huggingface.answer_ends import AnswerEnds
from millrace.core.config import RunConfig
from millrace.core.errors import BudgetError, EngineLostError
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.generation.single_samples import SampleGenerator
from tests.support.scripted_engines import FEW, ScriptedEngines

MakeConfig = Callable[..., RunConfig]


def failure_budget(share: float, samples: int) -> FailureBudget:
    field, what = "rollout.max_failed_share", "failed to generate"
    return FailureBudget(field, share, samples, what=what, where="iteration 4", remedy="fix the cause")


def generator(
    config: RunConfig, engines: ScriptedEngines, allowed: int = 0, failed: int = 0
) -> SampleGenerator:
    async def ready() -> ScriptedEngines:
        return engines

    budget = failure_budget(0.1, 10 * allowed)
    for number in range(failed):
        budget.add("engine-1: died", f"stored-{number}")
    return SampleGenerator(config, config.rollout.sampling, ready, budget)


async def test_a_request_carries_the_sampling_of_the_configuration_and_its_seed(
    make_config: MakeConfig,
) -> None:
    sampling = {"temperature": 0.5, "top_k": 3, "max_new_tokens": 9, "stop": ["x"]}
    engines = ScriptedEngines()
    made = generator(make_config(rollout={"sampling": sampling}), engines)
    await made.generate([1, 2], seed=11, rid="g-0000", session="g")
    params = {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "max_new_tokens": 9,
        "stop": ["x"],
        "stop_token_ids": None,
        "no_stop_trim": True,
        "sampling_seed": 11,
    }
    assert engines.requests == [("g-0000", [1, 2], params, "g")]


@pytest.mark.parametrize(
    ("least", "made", "own", "expected"),
    [
        (6, 0, {}, 6),
        (6, 2, {}, 4),
        (6, 7, {}, 0),
        (6, 0, {"max_new_tokens": 3}, 3),
        (6, 2, {"max_new_tokens": 4}, 2),
    ],
)
async def test_the_least_length_counts_what_is_made_and_yields_to_a_rows_longest(
    make_config: MakeConfig, least: int, made: int, own: dict[str, Any], expected: int
) -> None:
    engines = ScriptedEngines()
    of = generator(make_config(rollout={"sampling": {"max_new_tokens": 9, "min_new_tokens": least}}), engines)
    await of.generate([1], seed=0, rid="a", session=None, own=own, made=[5] * made)
    assert engines.requests[0][2]["min_new_tokens"] == expected


async def test_a_samples_own_parameters_come_in_place_of_the_sections(make_config: MakeConfig) -> None:
    engines = ScriptedEngines()
    made = generator(make_config(rollout={"sampling": {"max_new_tokens": 9, "stop": ["x"]}}), engines)
    await made.generate([1], seed=0, rid="a", session=None, own={"max_new_tokens": 4, "stop_token_ids": [7]})
    params = engines.requests[0][2]
    assert (params["max_new_tokens"], params["stop"], params["stop_token_ids"]) == (4, ["x"], [7])


async def test_every_request_names_where_answers_end_also_beside_a_samples_own_stops(
    make_config: MakeConfig,
) -> None:
    engines = ScriptedEngines()
    config = make_config(rollout={"sampling": {"max_new_tokens": 9, "stop": ["x", "<end>"]}})
    ends = AnswerEnds(engine=(1,), turn=5, eos=6, special={"<end>": 7})

    async def ready() -> ScriptedEngines:
        return engines

    budget = failure_budget(1.0, 10)
    made = SampleGenerator(config, config.rollout.sampling, ready, budget, ends=lambda: ends)
    for own in (None, {"stop": ["<end>"]}, {"stop_token_ids": [8]}, {"stop": ["y"], "max_new_tokens": 4}):
        await made.generate([1], seed=0, rid="a", session=None, own=own)
    asked = [(params["stop"], params["stop_token_ids"]) for _, _, params, _ in engines.requests]
    assert asked == [(["x"], [7, 5, 6]), (None, [7, 5, 6]), (["x"], [8, 7, 5, 6]), (["y"], [5, 6])]
    failed = await made.generate([1], seed=0, rid="b", session=None, own={"stop": ["<end>!"]})
    assert failed.status == "failed"
    assert "it holds the special token <end>" in (failed.reason or "")


async def test_a_sample_is_answered_and_counted(make_config: MakeConfig) -> None:
    made = generator(make_config(), ScriptedEngines())
    answer = await made.generate([1], seed=0, rid="a", session=None)
    assert (answer.generation, answer.reason, answer.status) == (FEW, None, "completed")
    assert (made.samples, made.tokens, made.outstanding) == (1, 2, 0)


async def test_failures_within_the_budget_are_answers_with_a_reason(make_config: MakeConfig) -> None:
    made = generator(make_config(), ScriptedEngines(lambda rid: rid == "b"), allowed=1)
    answers = [await made.generate([1], seed=0, rid=rid, session=None) for rid in "abc"]
    assert [answer.status for answer in answers] == ["completed", "failed", "completed"]
    failed = answers[1]
    assert (failed.generation, failed.reason, failed.output_ids.tolist(), failed.text) == (
        None,
        "engine-0: died",
        [],
        "",
    )
    assert (made.samples, made.tokens) == (3, 4)


@pytest.mark.parametrize("stored", [0, 1])
async def test_one_failure_above_the_budget_stops_also_after_a_restart(
    make_config: MakeConfig, stored: int
) -> None:
    made = generator(make_config(), ScriptedEngines(lambda _: True), allowed=2, failed=stored)
    for number in range(2 - stored):
        await made.generate([1], seed=0, rid=f"made-{number}", session=None)
    await made.generate([1], seed=0, rid="made-0", session=None)  # the same sample, which counts once
    with pytest.raises(BudgetError) as caught:
        await made.generate([1], seed=0, rid="made-2", session=None)
    assert str(caught.value) == (
        "iteration 4: 3 samples failed to generate, more than rollout.max_failed_share = 0.1 allows (2 of 20); most often: "
        f"engine-{stored}: died (3 of 3, such as sample {'stored-0' if stored else 'made-0'}); fix the cause"
    )


async def test_engines_are_made_ready_once_and_no_more_samples_are_in_flight_than_they_take(
    make_config: MakeConfig,
) -> None:
    in_flight, most, readied = 0, 0, 0

    class Slow(ScriptedEngines):
        async def generate(self, *arguments: object, **named: object):  # type: ignore[no-untyped-def, override]
            nonlocal in_flight, most
            in_flight += 1
            most = max(most, in_flight)
            await asyncio.sleep(0.001)
            in_flight -= 1
            return FEW

    async def ready() -> ScriptedEngines:
        nonlocal readied
        readied += 1
        await asyncio.sleep(0.001)
        return Slow()

    config = make_config(rollout={"max_concurrency": 2}, engines={"count": 2})
    made = SampleGenerator(config, config.rollout.sampling, ready, failure_budget(0.0, 1))
    await asyncio.gather(*(made.generate([1], seed=0, rid=str(i), session=None) for i in range(20)))
    assert (most, readied) == (4, 1)


async def test_an_engine_that_dies_while_it_is_made_ready_fails_no_sample(make_config: MakeConfig) -> None:
    deaths = iter([EngineLostError("engine-0 died: its process ended")])

    async def ready() -> ScriptedEngines:
        for death in deaths:
            raise death
        return ScriptedEngines()

    config = make_config()
    made = SampleGenerator(config, config.rollout.sampling, ready, failure_budget(0.0, 1))
    answer = await made.generate([1], seed=0, rid="first", session=None)
    assert answer.generation is not None
    assert answer.reason is None
