"""Algorithms in the trainer on a GPU: the guard's exactness, and the figures of plain models on the CPU.

In bfloat16, which the packed attention there needs, so that figures agree loosely; the guard is exact all the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from millrace.core.config.algorithm import Algorithm  # noqa: E402
from millrace.core.contracts.task_records import StepRequest
from tests.support import plain_trainer, trainer_ranks  # noqa: E402

CRITIC = {"lr": 1e-3, "clip": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "grpo, recomputed": {"old_logprobs": "recompute", "kl_coef": 0.1, "reference_update_steps": 2},
    "gspo, whitened": {"preset": "gspo", "whiten": True},
    "reinforce_plus_plus": {"preset": "reinforce_plus_plus"},
    "opd": {"preset": "opd", "teacher": "self"},
    "ppo": {
        "preset": "ppo",
        "kl_coef": 0.05,
        "kl_target": 1e-3,
        "kl_horizon": 20,
        "advantage": {"critic": CRITIC},
    },
}


SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": trainer_ranks.VOCAB,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    target = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(target)
    return target


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    target = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)).save_pretrained(target)
    return target


@pytest.mark.parametrize("per_iteration", [1, 2], ids=["a step an iteration", "two steps an iteration"])
@pytest.mark.parametrize("name", CASES)
def test_the_guard_holds_exactly_and_steps_are_those_of_plain_models(
    folder: Path, tmp_path: Path, name: str, per_iteration: int
) -> None:
    from millrace.connectors.trainers.megatron.rank import TrainerRank

    values = dict(CASES[name])
    if "teacher" in values:
        values["teacher"] = str(folder)
    config = Algorithm.model_validate(values)
    settings = trainer_ranks.configuration(
        folder, algorithm=values, device="cuda", dtype="bfloat16", global_batch=8, max_pack_tokens=256
    )
    rank = TrainerRank(settings, 0, 1)
    rank.setup(rank.address())
    assert torch.get_num_threads() == 1  # more would spin beside the thread that starts kernels
    plain = plain_trainer.PlainLearner(folder, config)
    try:
        for first in range(1, 5, per_iteration):
            steps = range(first, first + per_iteration)
            batches = {step: plain_trainer.scored(trainer_ranks.samples(step), config) for step in steps}
            rows = [row for batch in batches.values() for row in batch]
            url = trainer_ranks.write_batch(tmp_path / str(first), rows)
            plain.begin(rows)
            for step in steps:
                found: dict[str, Any] = dict(rank.train(StepRequest(step, url)))
                expected = plain.learn(batches[step], step)
                if step == first:
                    assert found["ratio_distance"] == 0.0
                for figure in ("loss", "value_loss", "kl_coef"):
                    if figure in expected:
                        assert found[figure] == pytest.approx(expected[figure], rel=0.1, abs=0.03)
        rank.save(str(tmp_path / "saved"))
        assert rank.load(str(tmp_path / "saved")) == 4
    finally:
        rank.shutdown()


def test_steps_of_a_model_of_experts_are_those_of_a_plain_one(experts: Path, tmp_path: Path) -> None:
    from millrace.connectors.trainers.megatron.rank import TrainerRank

    settings = trainer_ranks.configuration(
        experts, device="cuda", dtype="bfloat16", global_batch=8, max_pack_tokens=256
    )
    config = Algorithm.model_validate(settings["algorithm"])
    rank = TrainerRank(settings, 0, 1)
    rank.setup(rank.address())
    plain = plain_trainer.PlainLearner(experts, config)
    try:
        for step in (1, 2):
            batch = plain_trainer.scored(trainer_ranks.samples(step), config)
            plain.begin(batch)
            url = trainer_ranks.write_batch(tmp_path / str(step), batch)
            found = rank.train(StepRequest(step, url))
            assert found["loss"] == pytest.approx(plain.learn(batch, step)["loss"], rel=0.1, abs=0.03)
            assert found["grad_norm"] > 0
    finally:
        rank.shutdown()


PRODUCT = """
import json, os, sys, warnings, torch
from millrace.connectors.trainers.megatron.rank import TrainerRank
rank = TrainerRank(json.loads(sys.argv[1]), 0, 1)
rank.setup(rank.address())
assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ  # while it is there, every product parses it
warnings.simplefilter("error")
a = torch.randn(64, 64, device="cuda")
assert torch.are_deterministic_algorithms_enabled() and (a @ a).isfinite().all()
rank.shutdown()
"""


def test_products_of_a_deterministic_trainer_neither_warn_nor_parse_a_variable(folder: Path) -> None:
    settings = trainer_ranks.configuration(folder, device="cuda", dtype="bfloat16", deterministic=True)
    command = [sys.executable, "-c", PRODUCT, json.dumps(settings)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
