"""What the tests on GPUs hold each family's models to, held on a CPU; and that their tables name every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millrace.core.families.registry import BUILT_IN
from millrace.core.fixed_texts import mean_gap
from tests.support import family_runs, gpu_families
from tests.support.trainer_ranks import Workers, samples, write_batch

NAMES = [family.name for family in BUILT_IN]


def test_every_family_has_a_model_for_gpus_and_is_served_there_or_has_a_reason() -> None:
    assert sorted(gpu_families.OWN) == sorted(family_runs.ENGINES) == sorted(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize(("used", "least", "most"), [(4, 0.025, 0.05), (8, 0.0, 0.03)])
def test_choices_of_experts_that_rounding_turns_part_two_computations_of_qwen3_next(
    workers: Workers, tmp_path: Path, used: int, least: float, most: float
) -> None:
    """0.023 nats on the fixed texts before steps and 0.035 after four; 0.021 and 0.019 if a token uses all eight experts."""
    folder = gpu_families.save_model(tmp_path / "model", "qwen3_next", num_experts_per_tok=used)
    prompts, steps = family_runs.fixed_prompts(folder), 4
    with workers.group(gpu_families.settings(folder, "cpu")) as group:
        for step in range(1, steps + 1):
            rows = samples(step, longest=gpu_families.LONGEST)
            group.train([step], write_batch(tmp_path / str(step), rows))
        trainer = group.run(family_runs.rank_logprobs, steps, prompts)[0]
        group.call("export", str(tmp_path / "export"), steps)
    plain = gpu_families.PlainModel(tmp_path / "export", torch.bfloat16, "cpu")
    rows = [{"tokens": ids, "response_length": len(ids) - 1} for ids in prompts]
    with torch.no_grad():
        found = [plain.logprobs(row).tolist() for row in rows]
    gap = mean_gap(trainer, found)
    print(f"{used} of 8 experts: {gap:.4f} nats a token")
    assert least < gap < most


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_a_model_for_gpus_is_trained_as_hugging_faces_class(
    workers: Workers, tmp_path: Path, family: str
) -> None:
    folder = gpu_families.save_model(tmp_path / "model", family, **gpu_families.smooth(family))
    steps = gpu_families.batches(tmp_path)
    with workers.group(gpu_families.settings(folder, "cpu")) as group:
        gpu_families.check_logprobs(group.run, folder, steps, "cpu")
        gpu_families.check_gradients(group.run, folder, steps, "cpu", tmp_path)
        gpu_families.check_steps(group.run, folder, steps, "cpu", tmp_path)
