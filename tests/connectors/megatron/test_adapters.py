"""Adapters on megatron's ranks: steps, values and folders are those of plain pairs beside Hugging Face's model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.core.families.adapters import parameters_of, targeted
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from tests.connectors.megatron.test_parity import policy_loss
from tests.support.adapter_checks import (
    adapters,
    check_checkpoints_know_their_base,
    check_next_step,
    check_what_goes_out,
    tensors,
)
from tests.support.plain_lora import PlainLora
from tests.support.plain_trainer import LR, Plain
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import (
    RankFailedError,
    Workers,
    configuration,
    log_probabilities,
    samples,
    write_batch,
)

STEPS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor": 2},
    "tp2 sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "ep2": {"expert": 2},
    "dp2": {},
    "tp2 pp2": {"tensor": 2, "pipeline": 2, "sequence": True},
    "tp2 whole experts": {"tensor": 2, "sequence": True, "expert_tensor": 1},
    "cut experts": {"expert_tensor": 2},
    "ep2 cut experts": {"expert": 2, "expert_tensor": 2},
    "tp2 ep2": {"tensor": 2, "sequence": True, "expert": 2},
}
WITH_EXPERTS = [layout for layout, sizes in LAYOUTS.items() if {"expert", "expert_tensor"} & sizes.keys()]
LORA = {"rank": 4, "alpha": 8.0}
EVERY = r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|gate_up|down)_proj"
EXPERTS = EVERY.replace("mlp)", r"mlp(\.shared_experts?|\.experts\.\d+)?)")
FEED_FORWARD = r"model\.layers\.\d+\.mlp\.(shared_expert|experts\.\d+)\.(gate|up|down)_proj"
FIRST_PRODUCT = r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj"
SECOND_PRODUCT = r"model\.layers\.\d+\.mlp\.experts\.\d+\.down_proj"
PART = r"model\.layers\.[1]\.self_attn\.(q|v)_proj|model\.layers\.\d+\.mlp\.up_proj"
CASES = [
    *(("qwen3", layout, EVERY) for layout in LAYOUTS if layout not in WITH_EXPERTS),
    *(("qwen3_moe", layout, EXPERTS) for layout in LAYOUTS if layout != "tp2"),
    ("qwen3_moe", "ep2", EVERY),
    ("qwen3_moe", "ep2", FIRST_PRODUCT),
    ("qwen3_moe", "ep2 cut experts", SECOND_PRODUCT),
    ("qwen2_moe", "tp2 ep2", EXPERTS),
    ("glm4_moe", "tp2 sp", EXPERTS),
    ("deepseek_v3", "ep2 cut experts", EXPERTS),
    ("qwen3_next", "ep2", FEED_FORWARD),
    ("qwen3", "tp2 sp", PART),
    ("glm4", "tp2 sp", EVERY),
    ("qwen3_moe", "tp2 sp", EVERY),
    ("gpt_oss", "pp2", EVERY),
    ("deepseek_v3", "tp2 sp", EVERY),
]
USUAL = [  # each way to cut and each form of a layer once; others are slow
    ("qwen3", "tp1", EVERY),
    ("qwen3", "cp2", EVERY),
    ("qwen3", "tp2 pp2", EVERY),
    ("qwen3_moe", "ep2 cut experts", EXPERTS),
    ("deepseek_v3", "ep2 cut experts", EXPERTS),
    ("qwen3", "tp2 sp", PART),
    ("glm4", "tp2 sp", EVERY),
    ("gpt_oss", "pp2", EVERY),
    ("deepseek_v3", "tp2 sp", EVERY),
]


def settings(model: Path, layout: str = "tp1", targets: str = EVERY, **changes: Any) -> dict[str, Any]:
    parallel = LAYOUTS[layout]
    split = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("context", 1)
    experts = parallel.get("expert", 1) * parallel.get("expert_tensor", 1)
    ranks = 1 if layout == "tp1" else max(2, split, experts)
    lora = {**LORA, "targets": targets, **changes.pop("lora", {})}
    return configuration(model, ranks, parallel=parallel, lora=lora, optimizer={"lr": LR}, **changes)


@pytest.mark.parametrize(
    ("kind", "layout", "targets"),
    [case if case in USUAL else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_steps_and_adapters_are_those_of_plain_pairs(
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    tmp_path: Path,
    kind: str,
    layout: str,
    targets: str,
) -> None:
    folder = model(kind)
    config = settings(folder, layout, targets, algorithm={"kl_coef": 0.1})
    with workers.group(config) as group:
        group.call("export", str(tmp_path / "first"), 0)
        before = group.run(log_probabilities, batch.format(1))[0]
        ours = [group.train([step], batch.format(step))[0] for step in range(1, STEPS + 1)]
        group.call("export", str(tmp_path / "last"), STEPS)
    plain = PlainLora(folder, tmp_path / "first")
    with torch.no_grad():
        for row in samples(1):
            assert before[row["sample_id"]] == pytest.approx(Plain.logprobs(plain, row).tolist(), abs=2e-5)
    for step, found in enumerate(ours, start=1):
        loss = policy_loss(plain, samples(step), {}, 0.1)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=5e-6)
        assert found["grad_norm"] == pytest.approx(plain.step(loss), rel=1e-4)
    assert ours[0]["kl"] == 0
    assert ours[-1]["kl"] > 0
    last = adapters(tmp_path / "last")
    assert last.keys() == plain.tensors().keys()
    for name, expected in plain.tensors().items():
        assert float((last[name] - expected).abs().mean()) < LR / 100, name


@pytest.mark.parametrize(
    ("kind", "layout"),
    slow_but(
        [
            *(("qwen3", layout) for layout in LAYOUTS if layout not in WITH_EXPERTS),
            *(("qwen3_moe", layout) for layout in LAYOUTS if layout != "tp2"),
        ],
        ("qwen3", "tp1"),
        ("qwen3", "tp2 pp2"),
        ("qwen3_moe", "ep2"),
    ),
)
def test_the_first_pass_is_the_base(
    workers: Workers, model: Callable[..., Path], batch: str, kind: str, layout: str
) -> None:
    with_adapters = settings(model(kind), layout, EXPERTS if kind == "qwen3_moe" else EVERY)
    without = copy.deepcopy(with_adapters)
    without["trainer"]["lora"] = None
    found = []
    for config in (with_adapters, without):
        with workers.group(config) as group:
            found.append(group.run(log_probabilities, batch.format(1))[0])
    if layout.startswith("tp2"):  # of attention: the last bit of a product of a cut matrix may differ
        assert found[0] == {name: pytest.approx(values, abs=1e-6) for name, values in found[1].items()}
    else:
        assert found[0] == found[1]


def held(rank: Any) -> dict[str, Any]:
    """What a rank keeps beside the weights: elements of gradient buffers and of optimizer state, and which parameters train."""
    buffers = sum(
        buffer.grad_data.numel() for model in rank.learner.policy.models for buffer in model.buffers
    )
    states = sum(
        value.numel()
        for part in rank.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    trained = {name: each.numel() for name, each in rank.policy.named_parameters() if each.requires_grad}
    reference = sum(value.numel() for value in rank.learner.reference.weights.values())
    return {"gradients": buffers, "states": states, "trained": trained, "reference": reference}


@pytest.mark.parametrize(("kind", "targets"), [("qwen3", EVERY), ("qwen2_moe", EXPERTS)])
def test_gradients_optimizer_and_reference_hold_the_adapters_alone(
    workers: Workers, model: Callable[..., Path], batch: str, kind: str, targets: str
) -> None:
    with workers.group(settings(model(kind), targets=targets, algorithm={"kl_coef": 0.1})) as group:
        group.train([1], batch.format(1))
        (found,) = group.run(held)
    numbers = sum(found["trained"].values())
    assert all(".adapters." in name for name in found["trained"])
    shape = architecture(read_hf_config(str(model(kind))))
    assert numbers == sum(parameters_of(matrix, LORA["rank"]) for matrix in targeted(shape, targets))
    assert numbers <= found["gradients"] < numbers + 1024  # buffers are padded
    assert numbers <= found["states"] / 2 < numbers + 1024
    assert found["reference"] == numbers


def saved(rank: Any) -> set[str]:
    """Names of the tensors in a rank's part of a checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def found(tree: Any) -> set[str]:
        if isinstance(tree, ShardedTensor):
            return {tree.key}
        items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
        return set().union(*map(found, items))

    return found(rank.learner._sharded_state(loading=False))


@pytest.mark.parametrize(
    ("kind", "targets", "saved_by", "others"),
    [
        ("qwen3", EVERY, "tp2 sp", ["pp2"]),
        pytest.param(
            *("glm4_moe", EXPERTS, "ep2 cut experts", ["tp1", "tp2 ep2", "cut experts"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_holds_adapters_and_loads_under_another_layout(
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    tmp_path: Path,
    kind: str,
    targets: str,
    saved_by: str,
    others: list[str],
) -> None:
    folder = model(kind)
    with workers.group(settings(folder, saved_by, targets, algorithm={"kl_coef": 0.1})) as group:
        group.train([1], batch.format(1))
        group.call("save", str(tmp_path / "checkpoint"))
        names = set().union(*group.run(saved))
        expected = group.train([2], batch.format(2))[0]
        group.call("export", str(tmp_path / "straight"), 2)
    assert {name.partition("adapters.")[0] for name in names} == {
        "", "optimizer.state.param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.",
    }  # fmt: skip
    configs = {
        layout: settings(folder, layout, targets, algorithm={"kl_coef": 0.1})
        for layout in (saved_by, *others)
    }
    check_next_step(workers, configs, batch, tmp_path, 2, expected)


def test_a_checkpoint_belongs_to_its_base_and_to_runs_with_adapters(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    other = settings(model(initializer_range=0.03))
    check_checkpoints_know_their_base(workers, settings(model()), configuration(model()), other, tmp_path)


@pytest.mark.parametrize(
    ("kind", "targets", "layout"),
    [
        ("qwen3", EVERY, "tp1"),
        ("qwen3", EVERY, "tp2 pp2"),
        ("qwen2_moe", EXPERTS, "ep2 cut experts"),
        pytest.param("qwen3_moe", EXPERTS, "tp2 pp2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", EXPERTS, "tp2 ep2", marks=pytest.mark.slow),
    ],
)
def test_merged_weights_go_out_and_a_folder_of_adapters_starts_another_run(
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    tmp_path: Path,
    kind: str,
    targets: str,
    layout: str,
) -> None:
    folder, lora = model(kind), {"path": str(tmp_path / "adapters")}
    started = settings(folder, targets=targets, lora=lora, algorithm={"kl_coef": 0.1})
    check_what_goes_out(workers, settings(folder, layout, targets), started, folder, batch, tmp_path)


@pytest.mark.parametrize(
    ("recompute", "layout", "kind"),
    [
        ("selective", "tp1", "qwen3"),
        ("full", "pp2", "qwen3"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("selective", "pp2", "qwen3"),
                ("full", "tp1", "qwen3"),
                ("selective", "ep2 cut experts", "qwen3_moe"),
                ("full", "ep2 cut experts", "qwen3_moe"),
            )
        ),
    ],
)
def test_recomputed_activations_change_nothing(
    workers: Workers, model: Callable[..., Path], batch: str, recompute: str, layout: str, kind: str
) -> None:
    found, targets = [], EXPERTS if kind == "qwen3_moe" else EVERY
    for how in ("none", recompute):
        with workers.group(settings(model(kind), layout, targets, recompute=how)) as group:
            found.append([group.train([step], batch.format(step))[0] for step in (1, 2, 3)])
    for plain, again in zip(*found, strict=True):
        figures = again["loss"], again["grad_norm"]
        expected = plain["loss"], plain["grad_norm"]
        # layers that are computed again add up what reaches their input in another order
        assert figures == (pytest.approx(expected, rel=1e-5, abs=1e-8) if recompute == "full" else expected)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("qwen3", EVERY), pytest.param("qwen3_moe", EXPERTS, marks=pytest.mark.slow)],
)
def test_bfloat16_weights_stay_and_adapters_move(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path, kind: str, targets: str
) -> None:
    changes = {"reference_update_steps": 1, "kl_coef": 0.1}
    with workers.group(settings(model(kind), targets=targets, dtype="bfloat16", algorithm=changes)) as group:
        group.call("export", str(tmp_path / "first"), 0)
        found = [group.train([step], batch.format(step), guard=10.0)[0] for step in (1, 2)]
        group.call("export", str(tmp_path / "last"), 2)
        group.call("export", str(tmp_path / "merged"), 2, merged=True)
    assert [step["kl"] for step in found] == [0, 0]  # the reference follows after each step
    first, last = adapters(tmp_path / "first"), adapters(tmp_path / "last")
    assert {str(tensor.dtype) for tensor in last.values()} == {"torch.bfloat16"}
    assert [name for name in first if torch.equal(first[name], last[name])] == []
    base, merged = tensors(model(kind)), tensors(tmp_path / "merged")
    assert torch.equal(merged["model.norm.weight"], base["model.norm.weight"].bfloat16())


def test_a_folder_that_does_not_fit_is_refused_by_name(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    with workers.group(settings(model())) as group:
        group.call("export", str(tmp_path / "adapters"), 0)
    for changes, reason in (
        ({"rank": 8}, r"trainer.lora.rank = 8: the adapters of trainer.lora.path have r = 4; set it to 4"),
        ({"alpha": 4.0}, r"trainer.lora.alpha = 4.*lora_alpha = 8"),
        ({"targets": r".*\.q_proj"}, r"is of no matrix that has an adapter here"),
        ({"path": str(tmp_path)}, r"trainer.lora.path = .*adapter_config.json cannot be read"),
    ):
        config = settings(model(), lora={"path": str(tmp_path / "adapters"), **changes})
        with pytest.raises(RankFailedError, match=reason), workers.group(config):
            pass


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3", "tp1"),
        ("qwen3", "tp2 sp"),
        pytest.param("qwen3_moe", "tp1", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "ep2 cut experts", marks=pytest.mark.slow),
    ],
)
def test_passes_with_and_without_a_gradient_have_the_same_bits(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, kind: str, layout: str
) -> None:
    """Each iteration's first step has a ratio of exactly 1 to the log-probabilities of a pass before it, which keeps no graph."""
    targets = EXPERTS if kind == "qwen3_moe" else EVERY
    with workers.group(settings(model(kind), layout, targets, global_batch=8)) as group:
        for steps in ((1, 2), (3, 4)):
            url = write_batch(tmp_path / str(steps[0]), [row for step in steps for row in samples(step)])
            first, second = group.train(list(steps), url)
            assert first["ratio_distance"] == 0
            assert second["ratio_distance"] > 0
