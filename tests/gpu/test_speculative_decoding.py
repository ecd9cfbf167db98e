"""Speculative decoding by SGLang's own options: samples are the policy's, whatever the draft proposes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import flow_runs
from tests.support.flow_runs import Workplace, trained
from tests.support.gpu_workplace import steps_of

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "one_gpu.yaml"
ITERATIONS = 2
DRAFTS: dict[str, dict[str, Any]] = {
    "NGRAM": {"speculative_num_draft_tokens": 4, "speculative_ngram_max_bfs_breadth": 1},
    "STANDALONE": {"speculative_draft_model_path": "one-gpu-files/warm-model"},
}
MORE_THAN = {
    "NGRAM": 1.0,
    "STANDALONE": 2.0,
}  # tokens of a step in the best batch, one of which is not a draft's


@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", DRAFTS)
def test_samples_have_the_policys_log_probabilities(
    tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "PATIENCE_S", 420)
    config = yaml.safe_load(RECIPE.read_text())
    config["run"].update(name=f"draft-{algorithm.lower()}", iterations=ITERATIONS)
    config["storage"] = {"root": str(tmp_path / "runs")}
    config["evaluation"] = {"every": 100, "sets": []}
    options = {**DRAFTS[algorithm], "speculative_algorithm": algorithm, "decode_log_interval": 1}
    if "speculative_draft_model_path" in options:
        options["speculative_draft_model_path"] = str(tmp_path / options["speculative_draft_model_path"])
    config["engines"]["sglang"].update(options, max_running_requests=256)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "runs" / config["run"]["name"]
    place = Workplace(tmp_path)
    try:
        place.call("train", "run.yaml")
    finally:
        place.call("server", "stop")
    assert json.loads((run / "run.json").read_text())["completed"]
    assert (
        len(trained(run))
        == ITERATIONS * config["rollout"]["prompts"] * config["rollout"]["samples_per_prompt"]
    )
    steps = steps_of(run)
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    for step in steps[::2]:  # the first of an iteration trains what its own weights sampled
        assert 0 < step["logprob_gap_mean"] < 0.02
    accepted = [
        float(found)
        for found in re.findall(
            r"accept len: ([\d.]+)", (run / "logs" / "engine-0.log").read_text(errors="replace")
        )
    ]
    assert accepted
    assert max(accepted) > MORE_THAN[algorithm]
