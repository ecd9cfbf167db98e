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
from tests.connectors.megatron.test_adapters import EVERY, LORA, PART, adapters, tensors, tensors_of_buckets
from tests.connectors.megatron.test_parity import policy_loss
from tests.support.plain_lora import PlainLora, add_pairs
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


def test_megatrons_run_of_the_same_seed_starts_from_the_same_adapters(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    for kind in ("fsdp", "megatron"):
        with workers.group({**settings(model()), **configuration(model(), kind=kind, lora=LORA)}) as group:
            group.call("export", str(tmp_path / kind), 0)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "fsdp" / name).read_bytes() == (tmp_path / "megatron" / name).read_bytes()
