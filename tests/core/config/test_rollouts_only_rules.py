"""`pipeline.rollouts_only`: what it does not go with, and what such a run needs."""

from __future__ import annotations

import pytest

from millrace.core.config.parts.problems import Problem
from millrace.core.config.plan.layout import resource_layout
from millrace.core.config.plan.plan import make_plan
from millrace.core.config.reading.load import load_config
from millrace.core.config.rules import problems
from millrace.core.config.run_config import RunConfig
from millrace.flows.preflight.plan_table import _layout, _numbers

TEXT = """
run: {name: a, iterations: 4}
model: {path: m}
data: {sources: [{name: sums, path: s.jsonl}]}
evaluation: {sets: [{name: held, path: h.jsonl}]}
rollout: {prompts: 8, samples_per_prompt: 4}
trainer: {global_batch: 16, world_size: 2}
pipeline: {rollouts_only: true}
"""
TIS = "algorithm.correction.kind=truncate"
REFUSED = {
    "algorithm.loss": ["algorithm.loss=sft", "rollout.samples_per_prompt=1", "trainer.global_batch=8"],
    "pipeline.ahead": ["pipeline.ahead=1", TIS],
    "pipeline.eager": ["pipeline.eager=true", "trainer.global_batch=32"],
    "pipeline.select": ["pipeline.select=finish", "pipeline.max_staleness=1", TIS],
    "pipeline.sync_every": ["pipeline.sync_every=2", "checkpoint.every=2", "evaluation.every=2", TIS],
    "placement.colocate": ["placement.colocate=true", "trainer.device=cuda"],
    "rollout.buffer": ["rollout.buffer={max_age: 4}", TIS],
    "sync.max_prompt_gap": ["sync.max_prompt_gap=0.01"],
    "checkpoint.keep_best": ["checkpoint.keep_best=eval/held/reward_mean", "checkpoint.every=1"],
    "trainer.store_logprobs": ["trainer.store_logprobs=true"],
    "engines.kind": ["engines={kind: external, addresses: ['http://127.0.0.1:1']}", "sync.kind=disk"],
}


def config(*overrides: str) -> RunConfig:
    return load_config(None, list(overrides), text=TEXT)


def ours(found: list[Problem]) -> list[Problem]:
    return [problem for problem in found if "pipeline.rollouts_only" in problem.reason]


def test_a_run_that_trains_nothing_reserves_no_place_for_a_trainer() -> None:
    assert list(problems(config())) == []
    trained = resource_layout(config("pipeline.rollouts_only=false"), gpus=True)
    alone = resource_layout(config(), gpus=True)
    assert alone.needed["GPU"] == trained.needed["GPU"] - 2
    assert alone.of["trainer"] == []
    assert len(alone.of["engine"]) == len(trained.of["engine"])


@pytest.mark.parametrize("field", REFUSED)
def test_what_needs_a_trainer_is_refused_by_name(field: str) -> None:
    (problem,) = ours(list(problems(config(*REFUSED[field]))))
    assert problem.field == field
    assert "rollouts_only" in problem.remedy
    assert ours(list(problems(config(*REFUSED[field], "pipeline.rollouts_only=false")))) == []


def test_its_plan_has_no_step_no_trainer_and_no_checkpoint() -> None:
    plan = make_plan(config(), gpus=4)
    assert plan.layout.world_size == 0
    assert plan.layout.gpus == plan.layout.engines * plan.layout.gpus_an_engine
    assert not any("checkpoints" in path or "exports" in path for path in plan.files)
    said = dict([*_numbers(plan), *_layout(plan)])
    assert "no step" in said["an iteration"]
    assert "model.path" in said["all iterations"]
    assert "nothing is trained" in said["checkpoints"]
    assert "none" in said["trainer"]
    assert "weights of model.path" in said["engines"]
