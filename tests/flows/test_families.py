"""A whole run of a tiny model of each family: sampled, scored, trained, synced and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.core.families.registry import BUILT_IN
from tests.support.flow_runs import Workplace, trained
from tests.support.tiny_models import SEEING, save_tiny_model

VOCABULARY = 96
MOST = 2e-4  # nats a token, in float32


@pytest.mark.slow
@pytest.mark.parametrize("family", [*(family.name for family in BUILT_IN), *SEEING])
def test_a_family_is_trained_by_whole_runs(workplace: Workplace, tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path / "model", family, VOCABULARY, max_position_embeddings=256)
    build_tokenizer().save_pretrained(model)

    workplace.train(tmp_path / "runs", f"run.name={family}", f"model.path={model}")

    run = tmp_path / "runs" / family
    assert len(set(trained(run))) == 3 * 32
    steps = [
        json.loads((run / "iterations" / f"{index:06d}" / "step.json").read_text())["steps"]
        for index in range(3)
    ]
    assert all(0 < step["logprob_gap_mean"] < MOST for each in steps for step in each)
    first, last = (
        load_file(model / "model.safetensors"),
        load_file(run / "exports" / "000003" / "model.safetensors"),
    )
    assert [(name, tensor.shape, tensor.dtype) for name, tensor in sorted(first.items())] == [
        (name, tensor.shape, tensor.dtype) for name, tensor in sorted(last.items())
    ]
    fixed = {name for name in first if name.endswith("e_score_correction_bias") or ".visual." in name}
    assert {name for name in first if torch.equal(first[name], last[name])} == fixed
    AutoModelForCausalLM.from_pretrained(run / "exports" / "000003")
