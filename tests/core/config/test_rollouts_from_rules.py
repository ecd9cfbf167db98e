"""`pipeline.rollouts_from`: what it does not go with, and what such a run needs."""

from __future__ import annotations

import pytest

from millrace.core.config.parts.problems import Problem
from millrace.core.config.plan.layout import resource_layout
from millrace.core.config.plan.plan import make_plan
from millrace.core.config.reading.load import load_config
from millrace.core.config.rules import problems
from millrace.core.config.run_config import RunConfig
from millrace.flows.preflight.plan_learning import asynchrony
from millrace.flows.preflight.plan_seen import comparison
from millrace.flows.preflight.plan_table import _layout, _numbers

TEXT = """
run: {name: a, iterations: 4}
model: {path: m}
data: {sources: [{name: sums, path: s.jsonl}]}
rollout: {prompts: 8, samples_per_prompt: 4}
trainer: {global_batch: 16, world_size: 2}
pipeline: {rollouts_from: look}
"""
TIS = "algorithm.correction.kind=truncate"
REFUSED = {
    "pipeline.rollouts_from": ["run.name=look"],
    "algorithm.loss": ["algorithm.loss=sft", "rollout.samples_per_prompt=1", "trainer.global_batch=8"],
    "pipeline.rollouts_only": ["pipeline.rollouts_only=true"],
    "pipeline.ahead": ["pipeline.ahead=1", TIS],
    "pipeline.eager": ["pipeline.eager=true", "trainer.global_batch=32"],
    "pipeline.select": ["pipeline.select=finish", "pipeline.max_staleness=1", TIS],
    "pipeline.sync_every": ["pipeline.sync_every=2", "checkpoint.every=2", "evaluation.every=2", TIS],
    "placement.colocate": ["placement.colocate=true", "trainer.device=cuda"],
    "rollout.buffer": ["rollout.buffer={max_age: 4}", TIS],
    "sync.max_prompt_gap": ["sync.max_prompt_gap=0.01"],
    "evaluation.sets": ["evaluation.sets=[{name: held, path: h.jsonl}]"],
    "engines.kind": ["engines={kind: external, addresses: ['http://127.0.0.1:1']}", "sync.kind=disk"],
}


def config(*overrides: str) -> RunConfig:
    return load_config(None, list(overrides), text=TEXT)


def ours(found: list[Problem]) -> list[Problem]:
    return [problem for problem in found if "pipeline.rollouts_from" in problem.reason]


@pytest.mark.parametrize("field", REFUSED)
def test_what_needs_engines_is_refused_by_name(field: str) -> None:
    (problem,) = ours(list(problems(config(*REFUSED[field]))))
    assert problem.field == field
    assert ours(list(problems(config(*REFUSED[field], "pipeline.rollouts_from=null")))) == []


def test_a_run_that_generates_nothing_reserves_no_place_for_an_engine() -> None:
    assert list(problems(config())) == []
    generating, stored = (
        resource_layout(config(*more), gpus=True) for more in (["pipeline.rollouts_from=null"], [])
    )
    assert stored.of["engine"] == []
    assert stored.needed["GPU"] == generating.needed["GPU"] - 1
    assert stored.of["trainer"] == generating.of["trainer"]


def test_its_plan_names_the_run_and_has_no_engine() -> None:
    plan = make_plan(config(), gpus=4)
    assert (plan.layout.engines, plan.layout.world_size, plan.numbers.spare_prompts) == (0, 2, 0)
    assert plan.engine_memory == []
    said = dict([*_numbers(plan), *_layout(plan), *asynchrony(config())])
    assert "stored by the run look" in said["an iteration"]
    assert said["engines"].startswith("none")
    assert "run look" in said["asynchrony"]
    assert list(comparison(config())) == []
