"""`trainer.lora`: what it goes with, what is refused by name, which matrices a pattern means, and what the plan counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from millrace.core.config.lora_rules import model_problems, unknown_problems
from millrace.core.config.plan import make_plan
from millrace.core.config.plan.memory import GATHERED
from millrace.core.config.run_config import RunConfig
from millrace.core.families.adapters import (
    FORMS,
    USUAL,
    matrices,
    parameters_of,
    peft_targets,
    targeted,
)
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import resolved
from millrace.core.families.registry import BUILT_IN
from tests.core.config import test_plan
from tests.core.config.test_layout_rules import DENSE, LAYERS, MIXTURE
from tests.core.config.test_rules import fields
from tests.support.qwen3 import QWEN3_06B
from tests.support.tiny_models import sizes_of

LORA = "trainer.lora={rank: 4, alpha: 8}"
EVERYTHING = r"model\.layers\.\d+\.(self_attn|mlp\.experts\.\d+)\.(q|k|v|o|gate|up|down)_proj"
FSDP = "trainer.kind=fsdp"
ON_GPUS = ("engines.kind=sglang", "trainer.device=cuda")


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ([], []),
        (["algorithm.kl_coef=0.1"], []),
        (["algorithm.preset=ppo"], []),
        (["algorithm.loss=sft", "rollout.samples_per_prompt=1"], []),
        (["trainer.lora.rank=0"], ["trainer.lora.rank"]),
        (["trainer.lora.alpha=0"], ["trainer.lora.alpha"]),
        (["trainer.lora.dropout=0.1"], ["trainer.lora.dropout"]),
        (["trainer.lora.targets='('"], ["trainer.lora.targets"]),
        (["algorithm.reference=other", "algorithm.kl_coef=0.1"], ["algorithm.reference"]),
        (["trainer.rank='m:Rank'"], ["trainer.lora"]),
        (["trainer.megatron={moe_aux_loss_coeff: 0.1}"], ["trainer.megatron.moe_aux_loss_coeff"]),
        (["trainer.megatron={moe_z_loss_coeff: 0.1}"], ["trainer.megatron.moe_z_loss_coeff"]),
        ([FSDP], []),
        ([FSDP, "algorithm.kl_coef=0.1", "trainer.lora.path=pairs"], []),
        ([FSDP, "algorithm.loss=sft", "rollout.samples_per_prompt=1"], []),
        ([FSDP, "trainer.world_size=2", "trainer.parallel.context=2"], []),
        ([FSDP, "trainer.world_size=2", "trainer.parallel.replicate=2"], []),
        ([FSDP, "trainer.optimizer.offload=0.5", "trainer.recompute=full"], []),
        ([FSDP, "sync.lora=names", "engines.kind=embedded", "trainer.device=cpu"], []),
        ([FSDP, "algorithm.teacher=other", "algorithm.distillation_coef=0.5"], []),
        ([FSDP, "algorithm.preset=ppo"], ["algorithm.advantage.kind"]),
        ([FSDP, "algorithm.reference=other", "algorithm.kl_coef=0.1"], ["algorithm.reference"]),
        ([FSDP, "trainer.world_size=2", "trainer.parallel.tensor=2"], ["trainer.parallel.tensor"]),
    ],
    ids=str,
)
def test_what_needs_other_weights_is_refused_by_name(overrides: list[str], refused: list[str]) -> None:
    assert fields(LORA, *overrides) == refused


def config(targets: str = USUAL, kind: str = "megatron", **parallel: int) -> RunConfig:
    values: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"path": "m"},
        "data": {"sources": [{"path": "p"}]},
        "trainer": {"kind": kind, "world_size": 64, "parallel": parallel, "lora": {"targets": targets}},
    }
    return RunConfig.model_validate(values)


def tiny(kind: str) -> Architecture:
    """The architecture of a family's tiny model."""
    return architecture(resolved({"model_type": kind, **sizes_of(kind, 131)}, "test"))


def refusals(made: RunConfig, shape: Any) -> list[tuple[str, str]]:
    found = [*model_problems(made, shape)]
    assert all(problem.remedy for problem in found)
    return [(problem.field, problem.reason) for problem in found]


def test_the_usual_targets_are_all_of_attention_and_of_dense_mlps() -> None:
    assert refusals(config(), DENSE) == []
    assert refusals(config(pipeline=4), DENSE) == []
    assert len(targeted(DENSE, USUAL)) == 7 * LAYERS
    assert {matrix.name.rpartition(".")[2] for matrix in targeted(MIXTURE, USUAL)} == {
        f"{name}_proj" for name in "qkvo"
    }
    assert peft_targets(DENSE, USUAL) == (
        ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"), (),
    )  # fmt: skip
    only = r"model\.layers\.1\.self_attn\.[qv]_proj"
    assert peft_targets(DENSE, only).modules == tuple(
        f"model.layers.1.self_attn.{name}_proj" for name in "qv"
    )


EXPERTS = r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj"
FEED_FORWARD = r".*\.mlp\.(.*\.)?(gate|up|down)_proj"
SHARED, LATE, TOGETHER = tiny("qwen2_moe"), tiny("glm4_moe"), tiny("gpt_oss")


def test_fsdp_has_adapters_of_the_same_matrices_but_of_experts() -> None:
    for family in BUILT_IN:
        shape = tiny(family.name)
        for matrix in matrices(shape):
            found = refusals(config(re.escape(matrix.name), "fsdp"), shape)
            assert [field for field, _ in found] == (
                [] if matrix.supported and not matrix.of_experts else ["trainer.lora.targets"]
            ), matrix.name
    (refusal,) = refusals(config(EXPERTS, "fsdp"), SHARED)
    assert "FSDP's trainer has the experts of a layer in one tensor" in refusal[1]


def test_adapters_of_a_family_that_is_not_known_are_refused_by_name() -> None:
    (problem,) = unknown_problems(config(kind="fsdp"), "gemma3_text")
    assert problem.field == "trainer.lora"
    assert "the matrices of gemma3_text models are not known" in problem.reason


def test_peft_reads_dense_mlps_and_shared_experts_of_a_mixture_by_their_parameters() -> None:
    """It takes modules with these last names for experts."""
    assert peft_targets(MIXTURE, EXPERTS) == (("down_proj", "gate_proj", "up_proj"), ())
    kinds = ("down_proj", "gate_proj", "up_proj")
    found = peft_targets(LATE, FEED_FORWARD)
    assert found.modules == tuple(f"mlp.experts.{number}.{kind}" for number in range(4) for kind in kinds)
    places = "mlp", "mlp.shared_experts"
    assert set(found.parameters) == {f"{place}.{kind}.weight" for place in places for kind in kinds}
    first = peft_targets(LATE, r"model\.layers\.(0|1)\..*\.down_proj|model\.layers\.0\.mlp\.down_proj")
    assert first.parameters == ("mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight")
    assert first.modules == tuple(f"mlp.experts.{number}.down_proj" for number in range(4))
    assert peft_targets(SHARED, EXPERTS) == ((), ("mlp.experts.down_proj", "mlp.experts.gate_up_proj"))


@pytest.mark.parametrize(
    ("targets", "shape", "parallel", "field", "reason"),
    [
        ("attention", DENSE, {}, "trainer.lora.targets", "it matches no matrix of this qwen3 model"),
        (
            r".*\.down_proj",
            TOGETHER,
            {},
            "trainer.lora.targets",
            "it matches model.layers.0.mlp.experts.down_proj, and adapters of experts that are stored together are not supported",
        ),
        (
            r".*\.experts\.0\.down_proj",
            MIXTURE,
            {},
            "trainer.lora.targets",
            "it matches model.layers.0.mlp.experts.0.down_proj and not model.layers.0.mlp.experts.1.down_proj, and the experts of a layer",
        ),
        (
            r".*\.up_proj",
            MIXTURE,
            {},
            "trainer.lora.targets",
            "it matches model.layers.0.mlp.experts.7.up_proj and not model.layers.0.mlp.experts.0.gate_proj",
        ),
        (
            r".*\.shared_expert_gate",
            SHARED,
            {},
            "trainer.lora.targets",
            "adapters of the gates of shared experts are not supported",
        ),
        (
            r".*\.mlp\.gate",
            MIXTURE,
            {},
            "trainer.lora.targets",
            "it matches model.layers.0.mlp.gate, and adapters of routers are not supported",
        ),
        (
            r"model\.layers\.0\..*_proj",
            DENSE,
            {"pipeline": 2},
            "trainer.lora.targets",
            "a stage without adapters",
        ),
        (
            USUAL,
            DENSE,
            {"tensor": 4},
            "trainer.parallel.tensor",
            "it does not divide the model's 2 key-value heads",
        ),
    ],
)
def test_what_the_model_does_not_have_or_cannot_be_split_is_refused_by_name(
    targets: str, shape: Any, parallel: dict[str, int], field: str, reason: str
) -> None:
    ((found, why),) = refusals(config(targets, **parallel), shape)
    assert found == field
    assert reason in why


def test_each_family_says_which_of_its_matrices_may_have_adapters() -> None:
    """A matrix of a new kind is refused until somebody has looked."""
    ends = {
        part.parameter.rpartition("{layer}.")[2]
        for family in BUILT_IN
        for part in family.layer
        if any(len(shape) > 1 for shape in part.tensors.values())
    }
    assert ends == {
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight",
        # if each expert has tensors of its own
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        # refused: biases of experts, routers, gates and latents
        "mlp.router.weight",
        "mlp.experts.local_experts.{expert}.linear_fc1.bias",
        "mlp.experts.local_experts.{expert}.linear_fc2.bias",
        "mlp.shared_experts.gate_weight",
        "self_attention.linear_q_proj.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_kv_up_proj.weight",
        # and delta nets
        "self_attention.in_proj.weight",
        "self_attention.conv1d.weight",
        "self_attention.out_proj.weight",
    }
    forms = {part.form for family in BUILT_IN for part in family.layer}
    assert forms - set(FORMS) == {"turns", "gated_heads", "key_heads", "joined"}
    assert [matrix.name for matrix in matrices(DENSE) if not matrix.supported] == []
    with_experts = {family.name for family in BUILT_IN if any(part.of_experts for part in family.layer)}
    supported = {
        name
        for name in with_experts
        if any(matrix.of_experts and matrix.supported for matrix in matrices(tiny(name)))
    }
    assert with_experts - supported == {"gpt_oss", "qwen3_5_moe_text"}


def test_the_plan_counts_gradients_optimizer_and_checkpoint_of_the_adapters_alone(tmp_path: Path) -> None:
    changes = ["model.dtype=bfloat16", "algorithm.kl_coef=0.1", "trainer.lora={rank: 32}"]
    made = test_plan.config(tmp_path, *changes)
    plan = make_plan(made, gpus=1)
    shape = test_plan.architecture(QWEN3_06B)
    adapters = sum(parameters_of(matrix, 32) for matrix in targeted(shape, USUAL))
    assert (
        adapters == 20_185_088
    )  # 28 layers of 32 × (1024 + 2048 + 2 × (1024 + 1024) + 2048 + 1024 + 3 × (1024 + 3072))
    parts = {part.name: part.size for part in plan.trainer_memory}
    assert parts["weights, bfloat16"] == 2 * (shape.parameters + adapters)
    assert parts["gradients, fp32"] == 4 * adapters
    assert parts["optimizer, fp32, 1/1"] == 12 * adapters
    assert parts["the policy, put aside for the reference"] == 2 * adapters
    stored = {part.name: part.size for part in plan.disk}
    assert stored["3 checkpoints at most at once"] == 3 * 14 * adapters
    assert stored["1 export"] == 2 * adapters
    assert not any("versions" in part.name for part in plan.engine_memory)
    by_name = make_plan(test_plan.config(tmp_path, *changes, "sync.lora=names"), gpus=1)
    served = {part.name: part.size for part in by_name.engine_memory}
    assert served["adapters of 2 versions"] == 2 * 2 * adapters


def test_the_plan_of_fsdp_counts_frozen_weights_in_their_type_and_states_of_adapters(tmp_path: Path) -> None:
    changes = [FSDP, "trainer.world_size=4", "trainer.parallel.replicate=2", "model.dtype=bfloat16"]
    changes += ["algorithm.kl_coef=0.1", "trainer.lora={rank: 32}"]
    plan = make_plan(test_plan.config(tmp_path, *changes), gpus=4)
    shape = test_plan.architecture(QWEN3_06B)
    adapters = sum(parameters_of(matrix, 32) for matrix in targeted(shape, USUAL))
    parts = {part.name: part.size for part in plan.trainer_memory}
    assert parts["weights, bfloat16, 1/2"] == shape.parameters  # two bytes of a half
    assert parts["adapters, fp32, 1/2"] == parts["gradients, fp32, 1/2"] == 4 * adapters // 2
    assert parts["optimizer, fp32, 1/2"] == 8 * adapters // 2
    assert parts["the policy, put aside for the reference"] == 4 * adapters // 2
    blocks = (shape.parameters - shape.embedding) // shape.layers
    gathered = min(shape.layers, 2 * (GATHERED // blocks))  # blocks, with the next ones
    assert parts["gathered weights, bfloat16, and gradients of adapters"] == pytest.approx(
        2 * (shape.embedding + gathered * blocks) + 6 * gathered * adapters / shape.layers, rel=1e-6
    )
    stored = {part.name: part.size for part in plan.disk}
    assert stored["3 checkpoints at most at once"] == 3 * 12 * adapters


def test_the_plan_counts_the_adapters_of_a_ranks_own_experts(tmp_path: Path) -> None:
    layout = "trainer={world_size: 8, parallel: {tensor: 2, sequence: true, expert: 4, expert_tensor: 2}}"
    changes = ["model.dtype=bfloat16", layout, f"trainer.lora={{rank: 32, targets: '{EVERYTHING}'}}"]
    made = test_plan.config(tmp_path, *changes, hf=test_plan.MOE)
    shape = test_plan.architecture(test_plan.MOE)
    hidden, wide, layers = 1024, 256, 28
    experts = layers * 2 * 32 * (2 * (hidden + wide // 2) + (wide // 2 + hidden))  # two of eight, cut in two
    others = sum(
        parameters_of(matrix, 32, 2) for matrix in targeted(shape, EVERYTHING) if not matrix.of_experts
    )
    parts = {part.name: part.size for part in make_plan(made, gpus=8).trainer_memory}
    assert parts["gradients, fp32"] == 4 * (experts + others)
    assert parts["optimizer, fp32, 1/4"] == 12 * others // 4
    assert parts["optimizer of experts, fp32, 1/1"] == 12 * experts
    assert parts["weights, bfloat16"] == 2 * (test_plan.parameters_of_rank(made, shape) + experts + others)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ([], []),
        (["pipeline.ahead=1", "algorithm.correction.kind=truncate"], []),
        (["trainer.lora=null"], ["sync.lora"]),
        (["engines.kind=sglang", "trainer.device=cuda"], []),
        ([*ON_GPUS, "engines.prefill=1", "engines.count=2"], ["engines.prefill"]),
        (
            [*ON_GPUS, "engines.nodes=2", "engines.gpus=2", "placement.tensor_over_hosts=true"],
            ["engines.nodes"],
        ),
        ([*ON_GPUS, "placement.colocate=true"], ["placement.offload_engines"]),
        ([*ON_GPUS, "placement={colocate: true, offload_engines: false}"], []),
        (
            [*ON_GPUS, "engines.sglang={speculative_algorithm: NGRAM, lora_backend: triton}"],
            ["engines.sglang.speculative_algorithm"],
        ),
        ([*ON_GPUS, "engines.sglang.enable_dp_attention=true"], ["engines.sglang.enable_dp_attention"]),
        ([*ON_GPUS, "engines.sglang.max_lora_rank=8"], ["engines.sglang.max_lora_rank"]),
        ([*ON_GPUS, "engines.sglang.max_loras_per_batch=8"], ["engines.sglang.max_loras_per_batch"]),
        (["engines={kind: external, addresses: ['http://127.0.0.1:1']}"], []),
        (["engines={kind: external, addresses: ['http://192.0.2.1:1']}"], ["sync.directory"]),
        (["sync.kind=broadcast"], ["sync.lora"]),
        (["sync.directory='s3://a/b'"], ["sync.lora"]),
        (["evaluation={background: true, sets: [{name: held, path: held.jsonl}]}"], ["sync.lora"]),
        (["engines={kind: embedded, count: 2, router: {}}"], ["sync.lora"]),
        (["placement.task_runner=ray"], ["placement.task_runner"]),
        (
            ["pipeline={ahead: 1, on_update: finish}", "algorithm.correction.kind=truncate"],
            ["sync.lora"],
        ),
    ],
    ids=str,
)
def test_what_adapters_by_name_do_not_go_with_is_refused(overrides: list[str], refused: list[str]) -> None:
    by_name = ["trainer.lora={}", "sync.lora=names", "engines.kind=embedded", "trainer.device=cpu"]
    assert fields(*by_name, *overrides) == refused


@pytest.mark.parametrize(
    ("targets", "alone"),
    [
        (r".*self_attn\.(q|v)_proj", ""),
        (r".*self_attn\.(q|k|v|o)_proj", ""),
        (r".*self_attn\.o_proj", ""),
        (r".*mlp\.gate_proj", ""),
        (r".*self_attn\.q_proj", "q_proj to v_proj"),
        (r".*self_attn\.(k|v)_proj", "k_proj to q_proj"),
        (r".*self_attn\.v_proj", "v_proj to q_proj"),
        (r".*(layers\.0\.self_attn\.q|self_attn\.v)_proj", "v_proj to q_proj"),
        (r".*mlp\.(up|down)_proj", "up_proj to gate_proj"),
    ],
)
def test_what_sglang_joins_has_adapters_together_if_they_go_by_name(targets: str, alone: str) -> None:
    made = config(targets)
    assert refusals(made, DENSE) == []
    by_name = made.model_copy(update={"sync": made.sync.model_copy(update={"lora": "names"})})
    found = refusals(by_name, DENSE)
    assert [field for field, _ in found] == (["trainer.lora.targets"] if alone else [])
    assert all(alone in reason for _, reason in found)


@pytest.mark.parametrize(
    ("kind", "targets", "reason"),
    [
        ("qwen3_moe", EXPERTS, ""),
        ("glm4_moe", FEED_FORWARD, ""),
        ("qwen3_moe", EXPERTS.replace("|down", ""), "_proj matches without down_proj"),
        ("qwen3_moe", EXPERTS.replace("gate|up|", ""), "down_proj matches without gate_proj"),
        ("qwen2_moe", EXPERTS, "SGLang takes shared experts with a gate to be as wide as dense MLPs"),
        ("qwen2_moe", USUAL, ""),
    ],
)
def test_sglang_serves_adapters_of_experts_if_both_products_have_them(
    kind: str, targets: str, reason: str
) -> None:
    made, arch = config(targets), tiny(kind)
    assert refusals(made, arch) == []
    by_name = made.model_copy(update={"sync": made.sync.model_copy(update={"lora": "names"})})
    found = refusals(by_name, arch)
    assert [field for field, _ in found] == (["trainer.lora.targets"] if reason else [])
    assert all(reason in why for _, why in found)


def test_embedded_engines_serve_experts_beside_shared_ones_with_a_gate() -> None:
    made = config(EXPERTS)
    values = {**made.model_dump(mode="json"), "engines": {"kind": "embedded"}, "sync": {"lora": "names"}}
    assert refusals(RunConfig.model_validate(values), SHARED) == []
