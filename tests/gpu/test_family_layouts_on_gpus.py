"""Families whose layers need a way of their own over two GPUs: log-probabilities, gradients and steps are Hugging Face's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from tests.support import gpu_families as families
from tests.support.trainer_ranks import GpuWorkers

CUT = {"tensor": 2, "sequence": True}


@dataclass
class Case:
    """A family over two GPUs. model: what its configuration takes."""

    family: str
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)


CASES = {
    "a stage without experts": Case("deepseek_v3", {"pipeline": 2}),
    "virtual stages, tied": Case(
        "qwen3", {"pipeline": 2, "virtual": 2}, {"num_hidden_layers": 4, "tie_word_embeddings": True}
    ),
    "one key head of two ranks": Case("qwen3", CUT, {"num_key_value_heads": 1}),
    "one key head of two ranks, neighbours rotate": Case("glm4", CUT, {"num_key_value_heads": 1}),
    "latents cut": Case("kimi_k2", CUT),
    "latents exchanged": Case("glm4_moe_lite", {"context": 2}),
    "sinks exchanged": Case("gpt_oss", {"context": 2}),
    "sinks gathered": Case("gpt_oss", {"context": 2}, {"num_key_value_heads": 1}),
    "windows gathered": Case("mistral", {"context": 2}, {"num_key_value_heads": 1, "sliding_window": 8}),
    "stacked experts apart": Case("gpt_oss", {"expert": 2}),
    "delta nets, experts apart": Case("qwen3_5_moe_text", {"expert": 2}),
    "sigmoid experts apart": Case("glm4_moe", {"expert": 2}),
    "sigmoid experts apart, cut": Case("deepseek_v3", {**CUT, "expert": 2}),
    "experts cut": Case("qwen2_moe", {"expert_tensor": 2}),
}
pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("name", CASES)
def test_steps_over_two_gpus_are_those_of_hugging_face(
    workers: GpuWorkers, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    changes = {**families.smooth(case.family), **case.model}
    folder = families.save_model(tmp_path / "model", case.family, **changes)
    # every rank has whole gradients without it
    config = families.settings(folder, "cuda", 2, parallel=case.parallel, optimizer={"distributed": False})
    steps = families.batches(tmp_path)
    with workers.group(config) as group:
        families.check_logprobs(group.run, folder, steps, "cuda")
        families.check_gradients(group.run, folder, steps, "cuda", tmp_path)
    with workers.group(families.settings(folder, "cuda", 2, parallel=case.parallel)) as group:
        families.check_steps(group.run, folder, steps, "cuda", tmp_path)
