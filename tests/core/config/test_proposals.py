"""Layouts that a check proposes: those that fit, with their memory, and why each other does not."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.config import layout_rules
from millrace.core.config.plan.layout import layout_of
from millrace.core.config.plan.memory import host_memory, trainer_memory
from millrace.core.config.plan.preset_memory import KINDS, USED
from millrace.core.config.plan.proposals import AXES, proposals
from millrace.core.config.rules import problems
from millrace.core.config.run_config import RunConfig
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import resolved
from millrace.core.families.presets import PRESETS
from millrace.flows.preflight.layout_table import PARTS, layout_table

GIB = 2**30


def shape(preset: str) -> Architecture:
    return architecture(resolved(PRESETS[preset].config, PRESETS[preset].model))


def config(**sections: Any) -> RunConfig:
    values = {
        "run": {"name": "a"},
        "model": {"path": "m", "dtype": "bfloat16"},
        "data": {"sources": [{"path": "p"}]},
    }
    return RunConfig.model_validate({**values, **sections})


@pytest.mark.parametrize(("preset", "gpus"), [("qwen3-4b", 8), ("qwen3-30b-a3b", 16), ("qwen3-32b", 2)])
def test_each_layout_fits_or_has_its_reason(preset: str, gpus: int) -> None:
    model, asked = shape(preset), config()
    found = proposals(asked, model, gpus, 80 * GIB)
    for each in (*found.fit, *found.too_large):
        assert each.config.trainer.world_size == gpus
        assert [*layout_rules.problems(each.config, model), *problems(each.config)] == []
        assert each.parts == trainer_memory(each.config, model)
        assert each.fits == (each.size <= USED * 80 * GIB)
        less = {"none": None, "selective": "none", "full": "selective"}[each.config.trainer.recompute]
        if each.fits and less:  # no recomputation that it could do without
            trainer = each.config.trainer.model_copy(update={"recompute": less})
            parts = trainer_memory(each.config.model_copy(update={"trainer": trainer}), model)
            assert sum(part.size for part in parts) > USED * 80 * GIB
    splits = {
        tuple(getattr(each.config.trainer.parallel, axis) for axis in AXES)
        for each in (*found.fit, *found.too_large)
    }
    assert len(splits) == len(found.fit) + len(found.too_large)
    assert bool(found.fit) == (preset != "qwen3-32b")
    if preset == "qwen3-4b":
        assert found.undivided == {"does not divide the model's 36 layers": ["pipeline 8"]}
        assert max(tensor for tensor, *_ in splits) == 8


LONG = {  # answers of 16,384 tokens, each a pack
    "data": {"sources": [{"path": "p"}], "max_prompt_tokens": 1024},
    "rollout": {"sampling": {"max_new_tokens": 16384}},
}


@pytest.mark.parametrize(("preset", "gpus"), [("qwen3-4b", 1), ("qwen3-30b-a3b", 8)])
def test_a_model_fits_gpus_of_80_gb_with_its_optimizer_on_the_host(preset: str, gpus: int) -> None:
    """Without it the one fits no layout, and the other none in which each rank holds whole layers."""
    found = [
        proposals(
            config(trainer={"max_pack_tokens": 17408, "optimizer": {"offload": offload}}, **LONG),
            shape(preset),
            gpus,
            int(KINDS[80] * GIB),
        )
        for offload in (0.0, 1.0)
    ]
    whole = [[each for each in part.fit if each.config.trainer.parallel.tensor == 1] for part in found]
    assert whole[0] == []
    assert whole[1] != []
    for each in found[1].fit:
        host = host_memory(each.config, shape(preset), layout_of(each.config, gpus))
        stepped = next(part for part in host if "stepped there" in part.name)
        assert stepped.size == 12 * shape(preset).parameters


def test_a_tensor_parallel_group_is_proposed_over_hosts_only_if_it_may_span_them() -> None:
    model = shape("qwen3-32b")
    for over_hosts in (False, True):
        found = proposals(config(placement={"tensor_over_hosts": over_hosts}), model, 16, 80 * GIB)
        tensors = {each.config.trainer.parallel.tensor for each in (*found.fit, *found.too_large)}
        assert (16 in tensors) is over_hosts


def test_options_that_divide_layers_count_only_for_the_stages_that_they_divide() -> None:
    trainer = {
        "world_size": 2,
        "parallel": {"pipeline": 2},
        "megatron": {"num_layers_in_first_pipeline_stage": 17},
    }
    found = proposals(config(trainer=trainer), shape("qwen3-4b"), 4, 80 * GIB)
    options = {each.config.trainer.parallel.pipeline: each.config.trainer.megatron for each in found.fit}
    assert options == {1: {}, 2: trainer["megatron"], 4: {}}


def test_the_table_has_each_part_of_the_memory_and_is_short() -> None:
    lines = layout_table(proposals(config(), shape("qwen3-30b-a3b"), 64, 80 * GIB))
    assert "64 GPUs of 80 GiB" in lines[0]
    assert lines[1].split()[6:-2] == list(PARTS)
    assert len(lines) < 14
    assert all(len(line) < 400 for line in lines)
    first = dict(zip(lines[1].split(), lines[2].split(), strict=True))
    parts = sum(float(first[name]) for name in (*PARTS, "others"))
    assert parts == pytest.approx(float(first["all"]), abs=0.3)
    (none, *_) = layout_table(proposals(config(), shape("qwen3-32b"), 1, 80 * GIB))[1:]
    assert "none fits" in none
