"""The plan's numbers against counts made another way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.trainers.host_adamw import CHUNK, SLOTS
from millrace.core.config.plan import make_plan, parameters_of_rank
from millrace.core.config.plan.memory import BYTES_PER_LOGPROB
from millrace.core.config.plan.offload import host_step
from millrace.core.config.reading.overrides import apply
from millrace.core.config.run_config import RunConfig
from millrace.core.families.architecture import architecture
from millrace.flows.preflight.plan_table import _layout, host_step_text
from tests.support.qwen3 import QWEN3_06B

MOE = {
    **QWEN3_06B,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def config(folder: Path, *overrides: str, hf: dict[str, Any] = QWEN3_06B) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(hf))
    values: dict[str, Any] = {
        "run": {"name": "a", "iterations": 25},
        "model": {"path": str(folder)},
        "data": {"sources": [{"path": "x.jsonl"}]},
        "rollout": {"prompts": 16, "samples_per_prompt": 8},
    }
    for override in overrides:
        apply(values, override)
    return RunConfig.model_validate(values)


def test_parameters_are_those_of_the_published_model() -> None:
    assert architecture(QWEN3_06B).parameters == 596_049_920


@pytest.mark.parametrize(
    "hf",
    [QWEN3_06B, MOE, {**MOE, "decoder_sparse_step": 2}],
    ids=["dense", "experts", "experts in half of the layers"],
)
def test_one_rank_holds_the_whole_model(tmp_path: Path, hf: dict[str, Any]) -> None:
    assert parameters_of_rank(config(tmp_path, hf=hf), architecture(hf)) == architecture(hf).parameters


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_split_leaves_a_rank_less_than_the_whole_and_no_less_than_its_share(
    tmp_path: Path, axis: str
) -> None:
    shape = architecture(QWEN3_06B)
    held = parameters_of_rank(config(tmp_path, "trainer.world_size=2", f"trainer.parallel.{axis}=2"), shape)
    assert shape.parameters / 2 <= held < shape.parameters


def test_stored_log_probabilities_are_planned_for(tmp_path: Path) -> None:
    plain, stores = (
        make_plan(config(tmp_path, *changes), gpus=0) for changes in ([], ["trainer.store_logprobs=true"])
    )
    numbers = plain.numbers
    more = numbers.iterations * numbers.samples * numbers.response_tokens * BYTES_PER_LOGPROB
    assert sum(part.size for part in stores.disk) - sum(part.size for part in plain.disk) == more > 0


def test_numbers_of_an_iteration_and_of_the_run(tmp_path: Path) -> None:
    changes = [
        "trainer.global_batch=32",
        "checkpoint.every=10",
        "checkpoint.keep_last=1",
        "evaluation.every=10",
    ]
    numbers = make_plan(
        config(tmp_path, *changes, "evaluation.sets.0={name: h, path: h.jsonl}"), gpus=0
    ).numbers
    assert (numbers.samples, numbers.steps, numbers.weight_versions) == (128, 4, 100)
    assert (numbers.checkpoints, numbers.checkpoints_kept, numbers.exports) == ([10, 20, 25], [25], [25])
    assert numbers.evaluations == 4  # before, 10, 20, 25
    assert numbers.spare_prompts == 32
    twice = make_plan(config(tmp_path, *changes, "trainer.passes=2"), gpus=0).numbers
    assert (twice.samples, twice.passes, twice.steps, twice.weight_versions) == (128, 2, 8, 200)


def test_layout_follows_the_gpus_of_the_host(tmp_path: Path) -> None:
    settings = config(
        tmp_path, "trainer.world_size=4", "trainer.parallel.tensor=2", "engines.gpus=2", "engines.count=3"
    )
    on_gpus, on_cpu = make_plan(settings, gpus=8).layout, make_plan(settings, gpus=0).layout
    assert (on_gpus.device, on_gpus.engine_kind.name, on_gpus.data, on_gpus.gpus) == (
        "cuda",
        "sglang",
        2,
        4 + 6,
    )
    assert (on_cpu.device, on_cpu.engine_kind.name, on_cpu.gpus) == ("cpu", "embedded", 0)


def test_an_engine_over_nodes_is_counted_and_printed(tmp_path: Path) -> None:
    over = ["engines.gpus=16", "engines.nodes=2", "placement.tensor_over_hosts=true"]
    settings = config(tmp_path, "engines.count=2", *over)
    on_gpus = make_plan(settings, gpus=8)
    assert (on_gpus.layout.gpus, on_gpus.layout.nodes_an_engine) == (1 + 32, 2)
    assert dict(_layout(on_gpus))["engines"].startswith("2 sglang × 16 GPUs on 2 nodes;")
    on_cpu = make_plan(settings, gpus=0)
    assert on_cpu.layout.nodes_an_engine == 1
    assert dict(_layout(on_cpu))["engines"].startswith("2 embedded on CPU;")


def test_memory_of_bf16_adam(tmp_path: Path) -> None:
    plan = make_plan(config(tmp_path, "model.dtype=bfloat16", "trainer.world_size=4"), gpus=8)
    parameters = architecture(QWEN3_06B).parameters
    sizes = [part.size for part in plan.trainer_memory[:3]]
    assert sizes == [2 * parameters, 4 * parameters, 12 * parameters // 4]


@pytest.mark.parametrize(("expert", "copies"), [(1, 8), (2, 4), (8, 1)])
def test_states_of_experts_are_shared_by_ranks_of_the_same_experts_alone(
    tmp_path: Path, expert: int, copies: int
) -> None:
    split = ["trainer.world_size=8", f"trainer.parallel.expert={expert}", "model.dtype=bfloat16"]
    shape, made = architecture(MOE), config(tmp_path, *split, hf=MOE)
    of_dense, of_experts = [p.size for p in make_plan(made, gpus=8).trainer_memory if "optimizer" in p.name]
    experts = shape.layers * shape.experts * 3 * shape.hidden * shape.expert_ffn // expert
    assert of_experts == 12 * experts // copies
    assert of_dense == -(-12 * (parameters_of_rank(made, shape) - experts) // 8)


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        ((), [12, 14]),
        (("placement.offload_trainer=false",), [14]),
        (("checkpoint.background=false",), [12]),
        (("checkpoint.every=100",), [12]),
        (("trainer.device=cpu", "placement.colocate=false"), []),
    ],
)
def test_host_memory_of_all_ranks_together(
    tmp_path: Path, overrides: tuple[str, ...], bytes_each: list[int]
) -> None:
    on_gpus = ["model.dtype=bfloat16", "engines.kind=sglang", "placement.colocate=true", "checkpoint.every=2"]
    plan = make_plan(config(tmp_path, *on_gpus, *overrides), gpus=4)
    each = architecture(QWEN3_06B).parameters
    assert [part.size for part in plan.host_memory] == [bytes * each for bytes in bytes_each]


@pytest.mark.parametrize(
    ("offload", "on_gpu", "on_host"), [("0", 12, [12]), ("0.5", 6, [6, None, 6]), ("1", None, [12, None])]
)
def test_a_fraction_of_the_optimizer_state_moves_from_the_gpus_to_the_host(
    tmp_path: Path, offload: str, on_gpu: int | None, on_host: list[int | None]
) -> None:
    """None in on_host: the memory of chunks on their way, which does not grow with the model."""
    given = ["model.dtype=bfloat16", "engines.kind=sglang", "placement.colocate=true", "trainer.world_size=2"]
    given += ["engines.count=2", "checkpoint.background=false", f"trainer.optimizer.offload={offload}"]
    plan, each = make_plan(config(tmp_path, *given), gpus=2), architecture(QWEN3_06B).parameters
    optimizer = [part.size for part in plan.trainer_memory if part.name.startswith("optimizer")]
    assert optimizer == ([] if on_gpu is None else [on_gpu * each // 2])
    ways = 2 * SLOTS * 2 * CHUNK * 4
    assert [part.size for part in plan.host_memory] == [
        ways if size is None else size * each for size in on_host
    ]


def test_a_rank_of_fsdp_has_its_share_of_a_copy_of_all_state(tmp_path: Path) -> None:
    """Fp32 weights stay on the GPU; each of two copies has its own moments."""
    given = ["trainer.kind=fsdp", "model.dtype=bfloat16", "engines.kind=sglang", "placement.colocate=true"]
    given += ["trainer.world_size=4", "engines.count=4", "checkpoint.every=2"]
    each = architecture(QWEN3_06B).parameters
    for copies, offload, of_a_rank, on_host in (
        (1, 0, [4, 4, 8], [8, 12]),
        (2, 0, [8, 8, 16], [16, 12]),
        (2, 1, [8, 8], [24, None, 12]),
    ):
        split = [f"trainer.parallel.replicate={copies}", f"trainer.optimizer.offload={offload}"]
        plan = make_plan(config(tmp_path, *given, *split), gpus=4)
        assert plan.layout.replicate == copies
        states = [part.size for part in plan.trainer_memory if part.name.endswith(f"fp32, 1/{4 // copies}")]
        assert states == [pytest.approx(size * each / 4, rel=1e-6) for size in of_a_rank]
        kept = [part.size for part in plan.host_memory if "on their way" not in part.name]
        assert kept == [size * each for size in on_host if size is not None]
    step = host_step(config(tmp_path, *given, "trainer.optimizer.offload=1"), architecture(QWEN3_06B), 16)
    assert step is not None
    assert step.gradients == pytest.approx(4 * each / 4)


def test_a_step_waits_for_the_slower_of_adamw_on_the_host_and_pcie(tmp_path: Path) -> None:
    """The bytes are those of the model; with few cores AdamW is slower, with many PCIe could be."""
    given = ["model.dtype=bfloat16", "trainer.optimizer.offload=1"]
    each = architecture(QWEN3_06B).parameters
    shape = architecture(QWEN3_06B)
    few, many = (host_step(config(tmp_path, *given), shape, cores) for cores in (2, 16))
    assert few is not None
    assert many is not None
    assert (few.gradients, few.weights) == (4 * each, 2 * each)
    assert few.adamw_s == pytest.approx(8 * many.adamw_s)
    assert few.waits_s == few.adamw_s > few.copies_s == many.copies_s
    text = host_step_text(few)
    assert f"waits about {few.adamw_s:.2g} s for AdamW there" in text
    assert "2.22 GiB of gradients" in text
    assert "for PCIe" in host_step_text(replace(few, copies_s=2 * few.adamw_s))
    assert host_step(config(tmp_path, "trainer.optimizer.offload=0"), shape, 2) is None
    assert make_plan(config(tmp_path, *given), gpus=0).host_step is None


def test_ranks_of_a_host_share_its_cores_and_memory(tmp_path: Path) -> None:
    """Two ranks have half of the elements each, and half of the cores: AdamW takes as long, copies half as long."""
    given = ["model.dtype=bfloat16", "trainer.optimizer.offload=1"]
    shape = architecture(QWEN3_06B)
    one, two = (host_step(config(tmp_path, *given, f"trainer.world_size={n}"), shape, 16) for n in (1, 2))
    assert one is not None
    assert two is not None
    assert two.adamw_s == pytest.approx(one.adamw_s)
    assert two.copies_s == pytest.approx(one.copies_s / 2)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [(["algorithm.kl_coef=0.1"], "reference"), (["trainer.recompute=none"], "activations")],
)
def test_parts_that_only_some_runs_need(tmp_path: Path, overrides: list[str], name: str) -> None:
    assert any(name in part.name for part in make_plan(config(tmp_path, *overrides), gpus=1).trainer_memory)


@pytest.mark.parametrize("hf", [QWEN3_06B, MOE])
def test_recomputation_leaves_less_to_keep(tmp_path: Path, hf: dict[str, Any]) -> None:
    none, selective, full = (
        next(part.size for part in plan.trainer_memory if part.name.startswith("activations"))
        for how in ("none", "selective", "full")
        for plan in [make_plan(config(tmp_path, f"trainer.recompute={how}", hf=hf), gpus=1)]
    )
    assert 3 * full < selective < 0.9 * none


def test_a_critic_doubles_what_is_trained(tmp_path: Path) -> None:
    plain = make_plan(config(tmp_path), gpus=1).trainer_memory[0].size
    assert make_plan(config(tmp_path, "algorithm.preset=ppo"), gpus=1).trainer_memory[0].size == 2 * plain


def test_supervised_runs_have_no_engines(tmp_path: Path) -> None:
    plan = make_plan(config(tmp_path, "algorithm.loss=sft", "rollout.samples_per_prompt=1"), gpus=8)
    assert (plan.layout.engines, plan.layout.gpus, plan.engine_memory) == (0, 1, [])


def test_a_model_that_is_made_later_leaves_sizes_out(tmp_path: Path) -> None:
    plan = make_plan(config(tmp_path, "model.path=later"), gpus=0)
    assert (plan.parameters, plan.trainer_memory, plan.disk) == (None, [], [])
