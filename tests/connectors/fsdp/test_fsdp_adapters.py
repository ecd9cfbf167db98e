"""Adapters on FSDP's ranks: steps, values and folders are those of plain pairs beside Hugging Face's model."""

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
from tests.connectors.megatron.test_adapters import EVERY, LORA, PART
from tests.connectors.megatron.test_parity import policy_loss
from tests.connectors.megatron.test_peft_parity import KL, assert_twenty_steps_are_those_of_peft
from tests.support import gpu_families as families
from tests.support.adapter_checks import (
    adapters,
    check_checkpoints_know_their_base,
    check_next_step,
    check_what_goes_out,
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

STEPS = (1, 2, 3)
SHARED = EVERY.replace("mlp)", r"mlp(\.shared_experts?)?)")
RANKS: dict[str, tuple[int, dict[str, Any]]] = {  # their number, and settings of the trainer
    "1": (1, {}),
    "2": (2, {}),
    "context": (2, {"parallel": {"context": 2}}),
    "copies": (2, {"parallel": {"replicate": 2}}),
    "host": (2, {"optimizer": {"offload": 1.0}}),
    "recomputed": (2, {"recompute": "full"}),
}
CASES = [
    *(("qwen3", ranks, EVERY) for ranks in RANKS),
    ("qwen3", "2", PART),
    ("qwen2", "2", EVERY),
    ("glm4", "2", EVERY),
    ("qwen3_moe", "2", EVERY),
    ("qwen2_moe", "2", SHARED),
    ("glm4_moe", "2", SHARED),
]


def settings(model: Path, ranks: str = "1", targets: str = EVERY, **changes: Any) -> dict[str, Any]:
    world, of_them = RANKS[ranks]
    lora = {**LORA, "targets": targets, **changes.pop("lora", {})}
    optimizer = {"lr": LR, **of_them.get("optimizer", {})}
    return configuration(
        model, world, kind="fsdp", lora=lora, **{**of_them, "optimizer": optimizer, **changes}
    )


@pytest.mark.parametrize(
    ("kind", "ranks", "targets"),
    slow_but(CASES, ("qwen3", "2", EVERY), ("qwen3", "2", PART), ("qwen2_moe", "2", SHARED)),
)
def test_steps_and_adapters_are_those_of_plain_pairs(
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    tmp_path: Path,
    kind: str,
    ranks: str,
    targets: str,
) -> None:
    folder = model(kind)
    with workers.group(settings(folder, ranks, targets, algorithm={"kl_coef": 0.1})) as group:
        group.call("export", str(tmp_path / "first"), 0)
        before = group.run(log_probabilities, batch.format(1))[0]
        ours = [group.train([step], batch.format(step))[0] for step in STEPS]
        group.call("export", str(tmp_path / "last"), STEPS[-1])
    plain = PlainLora(folder, tmp_path / "first")
    with torch.no_grad():
        for row in samples(1):
            assert before[row["sample_id"]] == pytest.approx(Plain.logprobs(plain, row).tolist(), abs=2e-5)
    for step, found in zip(STEPS, ours, strict=True):
        loss = policy_loss(plain, samples(step), {}, 0.1)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=5e-6)
        assert found["grad_norm"] == pytest.approx(plain.step(loss), rel=1e-4)
    assert ours[0]["kl"] == 0
    assert ours[-1]["kl"] > 0
    last = adapters(tmp_path / "last")
    assert last.keys() == plain.tensors().keys()
    for name, expected in plain.tensors().items():
        assert float((last[name] - expected).abs().mean()) < LR / 100, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "targets"),
    [("qwen3", "2", EVERY), ("qwen3", "context", EVERY), ("qwen2_moe", "2", SHARED)],
)
def test_twenty_steps_are_those_of_peft(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, kind: str, ranks: str, targets: str
) -> None:
    folder = model(kind)
    config = settings(folder, ranks, targets, algorithm={"kl_coef": KL})
    assert_twenty_steps_are_those_of_peft(workers, config, folder, tmp_path)


def test_megatrons_run_of_the_same_seed_starts_from_the_same_adapters(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    for kind in ("fsdp", "megatron"):
        with workers.group({**settings(model()), **configuration(model(), kind=kind, lora=LORA)}) as group:
            group.call("export", str(tmp_path / kind), 0)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "fsdp" / name).read_bytes() == (tmp_path / "megatron" / name).read_bytes()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_but([("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen2", "bfloat16")], ("qwen3", "bfloat16")),
)
def test_the_first_pass_is_the_base(
    workers: Workers, model: Callable[..., Path], batch: str, kind: str, dtype: str
) -> None:
    with_adapters = settings(model(kind), "2", dtype=dtype)
    without = copy.deepcopy(with_adapters)
    without["trainer"]["lora"] = None
    found = []
    for config in (with_adapters, without):
        with workers.group(config) as group:
            found.append(group.run(log_probabilities, batch.format(1))[0])
    assert found[0] == found[1]


def held(rank: Any) -> dict[str, Any]:
    """What a rank keeps beside the weights: numbers by part, names and types of parameters, and names in its checkpoint."""
    from millrace.connectors.trainers.frozen_models import held

    learner = rank.learner
    parameters = dict(learner.policy.inner.named_parameters())
    state = learner.policy.optimizer.state
    return {
        "trained": {name: each.dtype for name, each in parameters.items() if each.requires_grad},
        "frozen": {each.dtype for each in parameters.values() if not each.requires_grad},
        "numbers": sum(held(each).numel() for each in parameters.values() if each.requires_grad),
        "moments": sum(held(each["exp_avg"]).numel() for each in state.values()),
        "reference": sum(each.numel() for each in learner.reference.weights.values()),
        "saved": set(learner._tensors()),
        "saved bytes": learner.checkpoint_bytes,
    }


def test_optimizer_reference_and_checkpoint_hold_the_adapters_alone_in_fp32(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    changes = {"kl_coef": 0.1, "reference_update_steps": 2}
    with workers.group(settings(model(), "2", dtype="bfloat16", algorithm=changes)) as group:
        group.call("export", str(tmp_path / "first"), 0)
        step = group.train([1], batch.format(1), guard=10.0)[0]
        found = group.run(held)
        group.call("export", str(tmp_path / "last"), 1)
    assert step["kl"] == 0
    shape = architecture(read_hf_config(str(model())))
    numbers = sum(parameters_of(matrix, LORA["rank"]) for matrix in targeted(shape, EVERY))
    for part in ("numbers", "moments", "reference"):
        assert sum(rank[part] for rank in found) == numbers
    assert sum(rank["saved bytes"] for rank in found) == 4 * 4 * numbers  # a reference beside state
    for rank in found:
        assert all(".adapter." in name for name in rank["trained"])
        assert set(rank["trained"].values()) == {torch.float32}
        assert rank["frozen"] == {torch.bfloat16}
        assert all(".adapter." in name for name in rank["saved"] - {"rng"})
    first, last = adapters(tmp_path / "first"), adapters(tmp_path / "last")
    assert {str(tensor.dtype) for tensor in last.values()} == {"torch.bfloat16"}
    assert [name for name in first if ".lora_B." in name and torch.equal(first[name], last[name])] == []


@pytest.mark.parametrize(
    ("saved_by", "others"), slow_but([("2", ["1"]), ("1", ["2", "copies"])], ("2", ["1"]))
)
def test_a_checkpoint_of_adapters_loads_with_another_number_of_ranks(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path, saved_by: str, others: list[str]
) -> None:
    changes: dict[str, Any] = {"algorithm": {"kl_coef": 0.1, "reference_update_steps": 2}}
    with workers.group(settings(model(), saved_by, **changes)) as group:
        for step in (1, 2):
            group.train([step], batch.format(step))
        group.call("save", str(tmp_path / "checkpoint"))
        expected = group.train([3], batch.format(3))[0]
        group.call("export", str(tmp_path / "straight"), 3)
    configs = {ranks: settings(model(), ranks, **changes) for ranks in (saved_by, *others)}
    check_next_step(workers, configs, batch, tmp_path, 3, expected)


def test_a_checkpoint_belongs_to_its_base_and_to_runs_with_adapters(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    whole, other = configuration(model(), kind="fsdp"), settings(model(initializer_range=0.03))
    check_checkpoints_know_their_base(workers, settings(model()), whole, other, tmp_path)


@pytest.mark.parametrize(
    ("kind", "targets"),
    slow_but([("qwen3", EVERY), ("glm4", EVERY), ("qwen2_moe", SHARED)], ("qwen2_moe", SHARED)),
)
def test_merged_weights_go_out_and_a_folder_of_adapters_starts_another_run(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path, kind: str, targets: str
) -> None:
    folder, lora = model(kind), {"path": str(tmp_path / "adapters")}
    started = settings(folder, "1", targets, lora=lora, algorithm={"kl_coef": 0.1})
    check_what_goes_out(workers, settings(folder, "2", targets), started, folder, batch, tmp_path)


@pytest.mark.parametrize("ranks", slow_but(["1", "recomputed"], "recomputed"))
def test_passes_with_and_without_a_gradient_have_the_same_bits(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, ranks: str
) -> None:
    with workers.group(settings(model(), ranks, global_batch=8)) as group:
        for steps in ((1, 2), (3, 4)):
            url = write_batch(tmp_path / str(steps[0]), [row for step in steps for row in samples(step)])
            first, second = group.train(list(steps), url)
            assert first["ratio_distance"] == 0
            assert second["ratio_distance"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FSDP_SPLITS)
def test_what_is_tried_on_two_gpus_passes_on_a_cpu(workers: Workers, tmp_path: Path, name: str) -> None:
    config, folder, steps = families.split(name, "cpu", tmp_path, lora=families.LORA)
    with workers.group(config) as group:
        families.check_adapters(group.run, folder, steps, "cpu", tmp_path)


@pytest.mark.slow
def test_supervised_steps_and_a_teacher_are_those_of_megatron(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    teacher = {"teacher": str(model("qwen3", initializer_range=0.05)), "distillation_coef": 0.5}
    for algorithm in ({"loss": "sft"}, teacher):
        found = []
        for kind in ("fsdp", "megatron"):
            config = configuration(model(), kind=kind, lora=LORA, algorithm=algorithm)
            with workers.group(config) as group:
                found.append([group.train([step], batch.format(step))[0] for step in STEPS])
        for ours, theirs in zip(*found, strict=True):
            for name in ("loss", "grad_norm"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), (algorithm, name)


def test_experts_and_families_that_are_not_known_are_refused_by_name(
    workers: Workers, model: Callable[..., Path]
) -> None:
    experts = r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj"
    for config, reason in (
        (settings(model("qwen3_moe"), targets=experts), r"trainer.lora.targets = .*experts\.0\.gate_proj"),
        (settings(model("gemma3")), r"model.path = .*adapters need a family"),
    ):
        with pytest.raises(RankFailedError, match=f"^ConfigError.*{reason}"), workers.group(config):
            pass
