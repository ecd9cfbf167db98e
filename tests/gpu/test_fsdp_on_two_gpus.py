"""FSDP's trainer over two GPUs, by every split and with its optimizer on the host: log-probabilities and steps are Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from tests.support import gpu_families as families
from tests.support.trainer_ranks import GpuWorkers

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("name", families.FSDP_SPLITS)
def test_steps_are_those_of_hugging_face(workers: GpuWorkers, tmp_path: Path, name: str) -> None:
    config, folder, steps = families.split(name, "cuda", tmp_path)
    with workers.group(config) as group:
        families.check_logprobs(group.run, folder, steps, "cuda")
        families.check_steps(group.run, folder, steps, "cuda", tmp_path)


@pytest.mark.parametrize("name", ["data", "context, one key head, windows", "copies"])
def test_steps_of_adapters_are_those_of_plain_pairs(workers: GpuWorkers, tmp_path: Path, name: str) -> None:
    config, folder, steps = families.split(name, "cuda", tmp_path, lora=families.LORA)
    with workers.group(config) as group:
        families.check_adapters(group.run, folder, steps, "cuda", tmp_path)
