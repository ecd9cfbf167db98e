"""Every field of the configuration in every mode acts, is refused by name, or is named by the plan as having no effect.

The table is kept in tests/golden/fields_by_mode.txt; `python -m tests.support.fields_by_mode` writes it again. A new field has
no line there, and a new mode changes lines: either fails until somebody has looked.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import millrace
from millrace.core.config.plan import make_plan
from millrace.core.config.plan.without_effect import NoEffect, no_effect
from millrace.core.config.rollout.section import RESHAPING
from millrace.flows.preflight.plan_learning import without_effect
from tests.core.config.test_rules import config
from tests.support import fields_by_mode as by_mode
from tests.support.fields_by_mode import KEPT, MODES, Outcome
from tests.support.settings_table import REBUILT, REFUSED, ROWS, TRAINED_WITH

ACT_NOWHERE = {f"rollout.sampling.{name}" for name in RESHAPING}
"""Of evaluation alone, as rollout.sampling refuses them in every run that generates."""

STAGES = {  # the work whose code reads a field, by the start of the module that ROWS names for it
    "tasks/data/": "draw",
    "tasks/sample_prompts.py": "draw",
    "tasks/rollout.py": "generate",
    "tasks/generation/answers.py": "generate",
    "tasks/generation/single_samples.py": "generate",
    "tasks/generation/sessions/": "generate",
    "tasks/shards/": "generate",
    "core/sessions/": "generate",
    "core/accounts/": "generate",
    "core/sharding.py": "generate",
    "connectors/engines/": "generate",
    "connectors/user_code/": "generate",
    "flows/preflight/check_session.py": "generate",
    "tasks/reward.py": "score",
    "tasks/runtime/scoring.py": "score",
    "tasks/runtime/hints.py": "score",
    "core/rewards/": "score",
    "connectors/rewards/": "score",
    "tasks/filter.py": "filter",
    "tasks/batching/judged_groups.py": "filter",
    "tasks/batching/batch_selection.py": "filter",
    "core/hooks/group_filters.py": "filter",
    "tasks/train_step.py": "train",
    "tasks/sync_weights.py": "sync",
    "tasks/checkpoint.py": "checkpoint",
    "tasks/evaluate.py": "evaluate",
}
STAGE_OF = {  # of fields whose module says nothing of the work, or that several read
    "algorithm.on_policy_guard": "train",
    "checkpoint.background": "checkpoint",
    "checkpoint.every": "checkpoint",
    "checkpoint.export_every": "checkpoint",
    "checkpoint.export_last": "checkpoint",
    "evaluation.every": "evaluate",
    "evaluation.background": "evaluate",
    "pipeline.ahead": "generate",
    "pipeline.eager": "generate",
    "pipeline.eager_groups": "generate",
    "pipeline.max_staleness": "generate",
    "pipeline.min_ess": "generate",
    "pipeline.on_update": "generate",
    "pipeline.reserve": "generate",
    "pipeline.select": "generate",
    "placement.offload_engines": "generate",
    "placement.offload_trainer": "train",
}
WORK = {  # what a recipe names, and the stage that it is
    "sample_prompts": "draw",
    "sample_supervised": "draw",
    "take_rollouts": "draw",
    "rollout": "generate",
    "reward": "score",
    "filter_groups": "filter",
    "train_step": "train",
    "sync_weights": "sync",
    "checkpoint": "checkpoint",
    "evaluate": "evaluate",
    "held_out_loss": "evaluate",
}
ELSEWHERE = {  # a field that acts in a run whose stage does not work, and where
    ("rollouts_only", "trainer.device"): "model.dtype=auto follows from it",
    ("rollouts_only", "trainer.global_batch"): "the numbers of weight versions follow from it",
    ("rollouts_only", "trainer.passes"): "the numbers of weight versions follow from it",
    ("rollouts_only", "sync.directory"): "a driver outside the cluster looks for it",
    (
        "sft",
        "rollout.sampling.max_new_tokens",
    ): "packs have room for it, and aggregation=constant divides by it",
    ("sft_dialogues", "rollout.sampling.max_new_tokens"): "packs have room for it",
}


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, Outcome]]:
    return by_mode.table()


def test_every_field_of_the_types_has_a_line_and_every_mode_is_sound(
    table: dict[str, dict[str, Outcome]],
) -> None:
    assert set(table) == by_mode.sections().keys()
    for mode in MODES:
        by_mode.mode_config(mode)


def test_what_fields_do_in_each_mode_is_what_was_looked_at(table: dict[str, dict[str, Outcome]]) -> None:
    kept = dict(line.split(": ", 1) for line in KEPT.read_text(encoding="utf-8").splitlines())
    now = dict(line.split(": ", 1) for line in by_mode.as_text(table).splitlines())
    differ = {
        path: (kept.get(path), now.get(path)) for path in {*kept, *now} if kept.get(path) != now.get(path)
    }
    assert not differ, "look at each, then write the table again: python -m tests.support.fields_by_mode"


def test_every_field_acts_in_a_mode(table: dict[str, dict[str, Outcome]]) -> None:
    assert {path for path, row in table.items() if "acts" not in row.values()} == ACT_NOWHERE


def test_a_field_acts_only_where_the_work_is_done_whose_code_reads_it(
    table: dict[str, dict[str, Outcome]],
) -> None:
    wrong = {
        (mode, path): stage_of(path)
        for path, row in table.items()
        for mode, found in row.items()
        if found == "acts" and stage_of(path) not in (*stages(mode), None)
    }
    assert wrong.keys() == ELSEWHERE.keys()


def stage_of(path: str) -> str | None:
    """The stage of an iteration in which a field acts; None for one that the driver reads throughout."""
    if path in STAGE_OF:
        return STAGE_OF[path]
    proof = ROWS[path].proof
    if proof in (REBUILT, TRAINED_WITH, REFUSED):
        section = path.partition(".")[0]
        by_section = {
            "engines": "generate",
            "sync": "sync",
            "trainer": "train",
            "rollout": "draw",
            "data": "draw",
        }
        return by_section.get(section)
    return next((stage for start, stage in STAGES.items() if proof.startswith(start)), None)


def stages(mode: str) -> set[str]:
    """The stages of an iteration of a mode, from the recipe that it follows."""
    config = by_mode.mode_config(mode)
    if config.algorithm.supervised:
        return worked("flows/sft.py", "sft_iteration")
    if config.pipeline.rollouts_from:
        return worked("flows/driver/stored_rollouts.py", "train_stored")
    whole = worked("flows/train.py", "iteration", "_fill_batch", "_generate", "_score", "_until_filled")
    whole |= worked("flows/driver/iteration_slots.py", "evaluate_if_due", "evaluate_beside")
    if config.pipeline.rollouts_only:
        return whole - {"train"}  # the task records what it would have trained
    return whole | worked("flows/train.py", "_save_and_serve")


@cache
def worked(module: str, *functions: str) -> set[str]:
    """The stages that functions of a recipe name."""
    tree = ast.parse((Path(millrace.__file__).parent / module).read_text(encoding="utf-8"))
    bodies = [
        node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) and node.name in functions
    ]
    assert len(bodies) == len(functions), f"{module} has other functions than {functions}"
    names = {node.id for body in bodies for node in ast.walk(body) if isinstance(node, ast.Name)}
    return {WORK[name] for name in names & WORK.keys()}


def test_a_field_that_is_set_without_effect_is_found_among_those_that_are_set(
    table: dict[str, dict[str, Outcome]],
) -> None:
    for path, row in table.items():
        mode = next((mode for mode, found in row.items() if found == "no effect"), None)
        if mode is None:
            continue
        changed, _ = by_mode.with_another(mode, path)
        assert path in [item.field for item in no_effect(changed)], f"{mode}: {path}"


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_as_it_is_sets_nothing_without_effect(mode: str) -> None:
    """What a preset sets, and what follows from other fields, nobody has set."""
    assert no_effect(by_mode.mode_config(mode)) == []


def test_a_default_that_is_given_is_not_reported() -> None:
    assert (
        no_effect(config("pipeline.reserve=0.25", "algorithm.loss.clip_high=0.2", "rollout.attempts=3")) == []
    )


def test_the_plan_names_fields_without_effect_by_their_reason() -> None:
    ignored = config("pipeline={reserve: 0.5, on_update: finish}", "filter.max_failed_share=0.2")
    assert list(without_effect(ignored, make_plan(ignored, gpus=0).layout)) == [
        ("no effect", "filter.max_failed_share: no filter.group_filter is named"),
        (
            "no effect",
            "pipeline.reserve: with pipeline.select=draw an iteration begins with the groups of its batch",
        ),
        (
            "no effect",
            "pipeline.on_update: with pipeline.ahead=0 no request is under way when weights change",
        ),
    ]


@pytest.mark.parametrize(
    ("gpus", "field", "because"),
    [
        (0, "engines.sglang", "engines.kind=auto is embedded here"),
        (1, "engines.max_running", "engines.kind=auto is sglang here"),
    ],
)
def test_options_of_the_engine_that_auto_does_not_take_have_no_effect(
    gpus: int, field: str, because: str
) -> None:
    both = config("engines={max_running: 8, sglang: {mem_fraction_static: 0.5}}")
    assert no_effect(both, make_plan(both, gpus=gpus).layout) == [NoEffect(field, because)]
