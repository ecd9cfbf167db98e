"""Every field of megatron-core's configuration classes: it acts, with a figure that shows it, or is refused.

The tables of millrace.core.config.megatron_options are held against the fields of the installed version, so that an upgrade
with a new field fails until somebody has judged it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from packaging.requirements import Requirement

from millrace.connectors.trainers.megatron.model.transformer_config import transformer_config
from millrace.core.config import RunConfig
from millrace.core.config.megatron_options.ddp import DDP
from millrace.core.config.megatron_options.optimizer import OPTIMIZER
from millrace.core.config.megatron_options.rules import problems
from millrace.core.config.megatron_options.table import OptionTable
from millrace.core.config.megatron_options.transformer import TRANSFORMER
from millrace.core.contracts.task_records import StepRequest
from millrace.core.families.config_file import read_hf_config
from tests.connectors.megatron.fields import installed as installed_fields
from tests.connectors.megatron.fields import kept as kept_fields
from tests.connectors.megatron.test_gradient_overlap import watch
from tests.connectors.megatron.test_recompute import WIDER, kept
from tests.support.trainer_ranks import Workers, configuration, log_probabilities, samples, write_batch

TABLES = {TransformerConfig: TRANSFORMER, OptimizerConfig: OPTIMIZER, DistributedDataParallelConfig: DDP}
REFUSED = [(table, name) for table in TABLES.values() for name in (*table.refused, *table.elsewhere)]


@pytest.mark.parametrize(("upstream", "table"), TABLES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_every_field_of_upstream_has_one_row(upstream: Any, table: OptionTable) -> None:
    rows = [*table.accepted, *table.elsewhere, *table.refused]
    assert len(rows) == len(table.names)
    by_version = {version: set(found[upstream.__name__]) for version, found in kept_fields().items()}
    version, found = installed_fields()
    assert by_version.get(version, set()) == set(found[upstream.__name__]), (
        f"`python -m tests.connectors.megatron.fields` keeps the fields of megatron-core {version}"
    )
    assert table.names == set.union(*by_version.values())
    assert all(table.refused.values())


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.of)
def test_an_accepted_field_is_in_every_version_that_is_supported(table: OptionTable) -> None:
    for version, found in kept_fields().items():
        assert set(table.accepted) <= set(found[table.of]), version


def test_fields_are_kept_of_every_minor_version_that_pyproject_allows() -> None:
    settings = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    needed = [Requirement(line) for line in settings["project"]["dependencies"]]
    (allowed,) = {line.specifier for line in needed if line.name == "megatron-core"}
    minors = [f"0.{minor}" for minor in range(99) if allowed.contains(f"0.{minor}.9")]
    assert minors == [version.rpartition(".")[0] for version in kept_fields()]
    assert all(allowed.contains(version) for version in kept_fields())


@pytest.mark.parametrize(("table", "name"), REFUSED, ids=lambda x: x if isinstance(x, str) else x.place)
def test_a_field_that_does_not_act_is_refused_by_name_with_the_reason(table: OptionTable, name: str) -> None:
    config = configuration("m")
    config["trainer"][table.place.removeprefix("trainer.")] = {name: None}
    (problem,) = problems(RunConfig.model_validate(config))
    assert problem.field == f"{table.place}.{name}"
    assert (table.refused.get(name) or table.elsewhere[name]) in problem.reason


# options that act


def step(rank: Any, url: str) -> dict[str, float]:
    """Figures of one step."""
    metrics = rank.train(StepRequest(1, url))
    return {name: metrics.get(name, 0.0) for name in ("grad_norm", "moe_aux_loss", "moe_z_loss")}


def scores(rank: Any, url: str) -> dict[str, Any]:
    return log_probabilities(rank, url)


def bytes_kept(rank: Any, _: str) -> int:
    return kept(rank)[0]


def layers_of_stage(rank: Any, _: str) -> int:
    return len(rank.policy.last.decoder.layers)


def outputs_freed(rank: Any, url: str) -> bool:
    """Whether the stage's outputs hold no more than the element that stands for them after a step."""
    outputs = []

    def keep(*call: Any) -> None:
        if call[2].requires_grad:  # not those of passes without a backward pass
            outputs.append(call[2])

    handle = rank.learner.policy.models[0].register_forward_hook(keep)
    rank.train(StepRequest(1, url))
    handle.remove()
    return all(out.numel() == 1 for out in outputs)


def reduced_precision(rank: Any, _: str) -> bool:
    """What cuBLAS is told; it has no effect on a CPU."""
    found: bool = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True  # the process serves other tests
    return found


def decay(rank: Any, url: str) -> dict[str, float]:
    """How far a step without a gradient moves a matrix and a norm of the first layer. Relative."""
    attention = rank.policy.last.decoder.layers[0].self_attention
    weights = {"matrix": attention.linear_proj.weight, "norm": attention.q_layernorm.weight}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    rank.train(StepRequest(1, url))
    return {
        name: float(((weight - before[name]).abs().max() / before[name].abs().max()).detach())
        for name, weight in weights.items()
    }


def buckets(rank: Any, _: str) -> tuple[int, int]:
    """Gradient buckets and their elements."""
    buffers = rank.learner.policy.models[0].buffers
    return sum(len(buffer.buckets) for buffer in buffers), sum(buffer.numel for buffer in buffers)


def reduced_in_backward(rank: Any, url: str) -> bool:
    """Whether sums over ranks are under way when the backward pass has ended."""
    watch(rank)
    rank.train(StepRequest(1, url))
    rank.train(StepRequest(2, url))  # megatron learns in the first step which gradients come
    return any(rank.under_way)


@dataclass
class Act:
    """An option, what is observed of rank 0 with it and without, and what the two must be."""

    options: dict[str, Any]
    observe: Callable[[Any, str], Any]
    shows: Callable[[Any, Any], bool]  # without, with
    world: int = 1
    place: str = "megatron"
    kind: str = "qwen3"
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)  # options of the same place that stay


PIPELINE: dict[str, Any] = {"world": 2, "trainer": {"parallel": {"pipeline": 2}}}
FOUR: dict[str, Any] = {**PIPELINE, "model": {"num_hidden_layers": 4}, "observe": layers_of_stage}
FULL: dict[str, Any] = {"observe": bytes_kept, "trainer": {"recompute": "full"}, "model": WIDER}
DECAY: dict[str, Any] = {
    "place": "megatron_optimizer",
    "observe": decay,
    "trainer": {"optimizer": {"lr": 0.01, "weight_decay": 0.5}},
}
RANKS: dict[str, Any] = {"place": "megatron_ddp", "world": 2}
ACTS: dict[str, Act] = {
    "trainer.megatron.moe_aux_loss_coeff": Act(
        {"moe_aux_loss_coeff": 0.1}, step, kind="qwen3_moe",
        shows=lambda off, on: off["moe_aux_loss"] == 0 < on["moe_aux_loss"] and off["grad_norm"] != on["grad_norm"],
    ),
    "trainer.megatron.moe_router_load_balancing_type": Act(
        {"moe_router_load_balancing_type": "seq_aux_loss"}, step, kind="qwen3_moe", beside={"moe_aux_loss_coeff": 0.1},
        shows=lambda off, on: on["moe_aux_loss"] > off["moe_aux_loss"] > 0,  # few tokens are less balanced than many
    ),
    "trainer.megatron.moe_z_loss_coeff": Act(
        {"moe_z_loss_coeff": 0.1}, step, kind="qwen3_moe",
        shows=lambda off, on: off["moe_z_loss"] == 0 < on["moe_z_loss"] and off["grad_norm"] != on["grad_norm"],
    ),
    "trainer.megatron.moe_router_dtype": Act(
        {"moe_router_dtype": "fp64"}, scores, kind="qwen3_moe",
        shows=lambda off, on: off != on and all(on[name] == pytest.approx(off[name], abs=1e-5) for name in off),
    ),
    "trainer.megatron.recompute_method": Act(
        {"recompute_method": "block"}, shows=lambda off, on: on > 1.2 * off, beside={"recompute_num_layers": 1}, **FULL
    ),
    "trainer.megatron.recompute_num_layers": Act(
        {"recompute_num_layers": 2}, shows=lambda off, on: on < off, **FULL
    ),
    "trainer.megatron.recompute_modules": Act(
        {"recompute_modules": ["core_attn", "mlp"]}, bytes_kept, shows=lambda off, on: on < 0.8 * off,
        trainer={"recompute": "selective"}, model=WIDER,
    ),
    "trainer.megatron.num_layers_in_first_pipeline_stage": Act(
        {"num_layers_in_first_pipeline_stage": 1}, shows=lambda off, on: (off, on) == (2, 1), **FOUR
    ),
    "trainer.megatron.num_layers_in_last_pipeline_stage": Act(
        {"num_layers_in_last_pipeline_stage": 1}, shows=lambda off, on: (off, on) == (2, 3), **FOUR
    ),
    "trainer.megatron.pipeline_model_parallel_layout": Act(
        {"pipeline_model_parallel_layout": "Et|t*3L"}, shows=lambda off, on: (off, on) == (2, 1), **FOUR
    ),
    "trainer.megatron.account_for_embedding_in_pipeline_split": Act(
        {"account_for_embedding_in_pipeline_split": True}, layers_of_stage, shows=lambda _, on: on == 1,
        **{**PIPELINE, "model": {"num_hidden_layers": 3}},
    ),
    "trainer.megatron.account_for_loss_in_pipeline_split": Act(
        {"account_for_loss_in_pipeline_split": True}, layers_of_stage, shows=lambda _, on: on == 2,
        **{**PIPELINE, "model": {"num_hidden_layers": 3}},
    ),
    "trainer.megatron.deallocate_pipeline_outputs": Act(
        {"deallocate_pipeline_outputs": True}, outputs_freed, shows=lambda off, on: (off, on) == (False, True), **PIPELINE
    ),
    "trainer.megatron.disable_bf16_reduced_precision_matmul": Act(
        {"disable_bf16_reduced_precision_matmul": True}, reduced_precision, trainer={"dtype": "bfloat16"},
        shows=lambda off, on: (off, on) == (True, False),
    ),
    "trainer.megatron_optimizer.apply_wd_to_qk_layernorm": Act(
        {"apply_wd_to_qk_layernorm": True}, **DECAY,
        shows=lambda off, on: off["norm"] == 0 and on["norm"] == pytest.approx(0.005, rel=1e-3),
    ),
    "trainer.megatron_optimizer.decoupled_weight_decay": Act(
        {"decoupled_weight_decay": False}, **DECAY,
        shows=lambda off, on: off["matrix"] == pytest.approx(0.005, rel=1e-3) and on["matrix"] > 0.05,
    ),
    "trainer.megatron_ddp.overlap_grad_reduce": Act(
        {"overlap_grad_reduce": False}, reduced_in_backward, shows=lambda off, on: (off, on) == (True, False), **RANKS
    ),
    "trainer.megatron_ddp.bucket_size": Act(
        {"bucket_size": 3000}, buckets, shows=lambda off, on: off[0] == 1 and on[0] > 3, **RANKS
    ),
    "trainer.megatron_ddp.pad_buckets_for_high_nccl_busbw": Act(
        {"pad_buckets_for_high_nccl_busbw": True}, buckets, shows=lambda off, on: off[1] % 2**16 != on[1] % 2**16 == 0,
        **RANKS,
    ),
}  # fmt: skip
ON_A_GPU = {"trainer.megatron.gradient_accumulation_fusion"}  # has a test of its own below
THREE_LAYERS = ("embedding", "loss")  # do not divide over two stages without the option


def test_every_accepted_option_is_observed() -> None:
    accepted = {f"{table.place}.{name}" for table in TABLES.values() for name in table.accepted}
    assert accepted == {*ACTS, *ON_A_GPU}


@pytest.mark.parametrize("name", ACTS)
def test_an_accepted_option_acts(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    act = ACTS[name]
    rows = samples(1) + samples(2)
    if act.observe is decay:
        for row in rows:
            row["advantage"] = 0.0
    url = write_batch(tmp_path, rows)
    divides = not name.removesuffix("_in_pipeline_split").endswith(THREE_LAYERS)
    found: list[Any] = []
    for options in ({}, act.options) if divides else (act.options,):
        config = configuration(
            model(act.kind, **act.model), act.world, **{**act.trainer, act.place: {**act.beside, **options}}
        )
        assert list(problems(RunConfig.model_validate(config))) == []
        with workers.group(config) as group:
            found.append(group.run(act.observe, url)[0])
    assert act.shows(found[0], found[-1]), found


def test_gradient_accumulation_fusion_chooses_the_layers_product(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron's linear layers read this field; where the fused product exists there is a GPU."""
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    hf = read_hf_config(str(model()))
    for options, fused in (({}, True), ({"gradient_accumulation_fusion": False}, False)):
        config = RunConfig.model_validate(configuration(model(), device="auto", megatron=options))
        assert transformer_config(config, hf).gradient_accumulation_fusion is fused


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"megatron": {"recompute_num_layers": 2}}, "trainer.megatron.recompute_num_layers"),
        ({"megatron": {"deallocate_pipeline_outputs": True}}, "trainer.megatron.deallocate_pipeline_outputs"),
        ({"megatron": {"moe_router_load_balancing_type": "aux_loss"}}, "trainer.megatron.moe_router_load_balancing_type"),
        ({"megatron": {"moe_router_dtype": "fp8"}}, "trainer.megatron.moe_router_dtype"),
        ({"megatron": {"moe_z_loss_coeff": -1}}, "trainer.megatron.moe_z_loss_coeff"),
        ({"megatron": {"no_such_field": 1}}, "trainer.megatron.no_such_field"),
        ({"megatron": {"moe_z_loss_coeff": 0.1, "recompute_modules": ["moe"]}, "recompute": "selective"}, "trainer.megatron.recompute_modules"),
        ({"megatron_ddp": {"bucket_size": 1000}}, "trainer.megatron_ddp.bucket_size"),
        ({"megatron_optimizer": {"decoupled_weight_decay": "no way"}}, "trainer.megatron_optimizer.decoupled_weight_decay"),
    ],
)  # fmt: skip
def test_an_accepted_option_that_would_do_nothing_here_is_refused(changes: Any, field: str) -> None:
    found = list(problems(RunConfig.model_validate(configuration("m", **changes))))
    assert [problem.field for problem in found] == [field]


@pytest.mark.parametrize("kind", ["sinkhorn", "none", "global_aux_loss", ["aux_loss"]])
def test_a_balance_that_follows_from_packs_or_is_another_name_is_refused(kind: Any) -> None:
    options = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": kind}
    found = list(problems(RunConfig.model_validate(configuration("m", megatron=options))))
    assert [problem.field for problem in found] == ["trainer.megatron.moe_router_load_balancing_type"]
