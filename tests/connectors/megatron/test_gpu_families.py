"""What the tests on GPUs hold each family's models to, held on a CPU; and that their tables name every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.core.families.registry import BUILT_IN
from tests.support import family_runs, gpu_families
from tests.support.trainer_ranks import Workers

NAMES = [family.name for family in BUILT_IN]


def test_every_family_has_a_model_for_gpus_and_is_served_there_or_has_a_reason() -> None:
    assert sorted(gpu_families.OWN) == sorted(family_runs.ENGINES) == sorted(NAMES)


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
