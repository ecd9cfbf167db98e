"""Trainer and engine on a GPU each: a run completes, weights travel through shared memory, log-probabilities agree."""

from __future__ import annotations

import json
from pathlib import Path

import flow_runs
import pytest
import torch
from flow_runs import Workplace, trained
from gpu_workplace import GROUP, PROMPTS, furnish, steps_of

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)


@pytest.mark.timeout(900)
def test_a_run_with_the_engine_on_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_runs, "PATIENCE_S", 420)
    furnish(
        tmp_path,
        run={"name": "apart", "iterations": 3},
        placement={"colocate": False},
        sync={"kind": "disk", "verify": False},
    )
    place = Workplace(tmp_path)
    try:
        place.call("train", "run.yaml")
    finally:
        place.call("server", "stop")
    run = tmp_path / "runs" / "apart"
    assert json.loads((run / "run.json").read_text())["completed"]
    assert len(trained(run)) == 3 * PROMPTS * GROUP
    for step in steps_of(run):
        assert 0 < step["logprob_gap_mean"] < 0.02
