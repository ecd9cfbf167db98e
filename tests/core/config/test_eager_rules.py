"""What `pipeline.eager` is refused with, by the field or the setting that the reason names; and what it goes with."""

from __future__ import annotations

import pytest

from millrace.core.config.eager_rules import OF_GROUPS
from millrace.core.config.rules import problems
from tests.core.config.test_rules import config

EAGER = "pipeline.eager=true"
REFUSED: dict[str, list[str]] = {
    "placement.colocate": ["placement.colocate=true"],
    "pipeline.ahead": ["pipeline.ahead=1"],
    "pipeline.select=finish": ["pipeline.select=finish", "pipeline.max_staleness=1"],
    "rollout.buffer": ["rollout.buffer={share: 0.25}"],
    "supervised": ["algorithm.loss=sft", "rollout.samples_per_prompt=1"],
    "algorithm.advantage=gae": ["algorithm.preset=ppo"],
    "algorithm.advantage=reinforce_plus_plus": ["algorithm.preset=reinforce_plus_plus"],
    "algorithm.advantage=function": ["algorithm.advantage={kind: function, function: 'package.module:name'}"],
    "algorithm.advantage=none": ["algorithm.preset=opd", "algorithm.teacher=teacher"],
    "algorithm.whiten": ["algorithm.whiten=true"],
    "algorithm.shaping": ["algorithm.shaping={function: 'package.module:name'}"],
    "algorithm.loss": ["algorithm.loss={kind: function, function: 'package.module:name'}"],
    "algorithm.teacher": ["algorithm.distillation_coef=0.5", "algorithm.teacher=teacher"],
    "a KL in the reward": ["algorithm.kl_coef=0.1", "algorithm.kl_placement=reward"],
    "trainer.passes": ["trainer.passes=2"],
    "trainer.global_batch": ["trainer.global_batch=16"],
    "trainer.megatron.moe_aux_loss_coeff": ["trainer.megatron={moe_aux_loss_coeff: 0.1}"],
    "trainer.megatron.moe_z_loss_coeff": ["trainer.megatron={moe_z_loss_coeff: 0.1}"],
}


def said(*overrides: str) -> dict[str, str]:
    """The problems of fields of `pipeline.eager`, by field."""
    return {
        problem.field: str(problem)
        for problem in problems(config(*overrides))
        if problem.field.startswith("pipeline.eager")
    }


@pytest.mark.parametrize("named", REFUSED)
def test_what_needs_the_whole_batch_is_refused_by_name_with_a_remedy(named: str) -> None:
    assert not said(*REFUSED[named])
    every = [str(each) for each in problems(config(EAGER, *REFUSED[named])) if each.field == "pipeline.eager"]
    assert [text for text in every if named in text]
    assert all(text.endswith("or set it to false") for text in every)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["pipeline.eager_groups=7"],
        ["algorithm.preset=dapo", "filter.oversample=0.5"],
        ["algorithm.preset=dr_grpo"],
        ["algorithm.preset=gspo"],
        ["algorithm.preset=cispo"],
        ["algorithm.preset=rloo"],
        ["algorithm.preset=max_rl"],
        ["algorithm.kl_coef=0.1", "algorithm.old_logprobs=recompute", "algorithm.entropy_coef=0.01"],
        ["rollout.session.function=package.module:play"],
        *([f"algorithm.advantage={kind}", "algorithm.whiten=false"] for kind in OF_GROUPS),
    ],
    ids=" ".join,
)
def test_what_is_known_once_a_group_is_scored_goes_with_it(overrides: list[str]) -> None:
    assert not said(EAGER, *overrides)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["pipeline.eager_groups=4"], "leave it out, or set pipeline.eager=true"),
        ([EAGER, "pipeline.eager_groups=8"], "set it to 7 or less"),
        ([EAGER, "rollout.prompts=1"], "raise rollout.prompts"),
    ],
)
def test_chunks_that_could_not_begin_early_are_refused(overrides: list[str], remedy: str) -> None:
    assert said(*overrides)["pipeline.eager_groups"].endswith(remedy)


@pytest.mark.parametrize(("prompts", "groups"), [(2, 1), (8, 1), (9, 2), (32, 4), (256, 32)])
def test_a_chunk_is_an_eighth_of_the_batch_unless_it_is_said(prompts: int, groups: int) -> None:
    assert config(f"rollout.prompts={prompts}", EAGER).pipeline.chunk_groups(prompts) == groups
    assert config(EAGER, "pipeline.eager_groups=3").pipeline.chunk_groups(prompts) == 3
