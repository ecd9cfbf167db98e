"""Whole runs with rollout.routing_replay: what engines chose is stored with each sample, trained with, and survives a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.routed_experts import RoutingFormat
from tests.support.flow_runs import Workplace, failures, final_weights, generated, trained

REPLAY = "rollout.routing_replay=true"
EXPERTS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "model", seed=0, experts=EXPERTS)


def steps(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "iterations").glob("*/step.json"))
    return [step for file in files for step in json.loads(file.read_text())["steps"]]


def rows(run: Path) -> list[dict[str, Any]]:
    columns = ["sample_id", "tokens", "response_length", "loss_mask", "routed_experts"]
    files = sorted((run / "iterations").glob("*/batch.parquet"))
    return [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]


def check_rows(run: Path, model: Path) -> None:
    """Each trained sample has a row for every token but the last."""
    form = RoutingFormat.of(architecture(read_hf_config(str(model))))
    assert form is not None
    found = rows(run)
    assert found
    for row in found:
        count = len(row["tokens"])
        last = len(row["loss_mask"]) - row["loss_mask"][::-1].index(1)
        needed = count - row["response_length"] + last - 1
        read = form.read(row["routed_experts"], count, needed)
        assert read.shape == (needed, len(form.expert_layers), form.used), "and none for what follows"


def test_a_run_trains_with_the_experts_of_its_engine_and_a_killed_one_ends_alike(
    workplace: Workplace, model: Path, tmp_path: Path
) -> None:
    """In float32 the engine chooses as the trainer does, so that with a step an iteration the weights are those of a run without it."""
    settings = (f"model.path={model}", "run.iterations=2", "trainer.global_batch=32")
    workplace.train(tmp_path / "plain", *settings)
    plain, run, killed = (tmp_path / root / "a" for root in ("plain", "whole", "killed"))
    out = workplace.train(tmp_path / "whole", *settings, REPLAY)
    assert not failures(run), out
    check_rows(run, model)
    assert all(step["routing_agreement"] == 1 for step in steps(run))
    assert all("routing_agreement" not in step for step in steps(plain))
    assert rows(plain)[0]["routed_experts"] is None
    assert final_weights(run) == final_weights(plain)

    parts = killed / "iterations" / "000001" / "rollouts"
    workplace.train_and_kill(tmp_path / "killed", lambda: any(parts.glob("part-*")), *settings, REPLAY)
    workplace.train(tmp_path / "killed", *settings, REPLAY)
    assert trained(killed) == trained(run)
    assert max(generated(killed).values()) == 1
    assert [row["routed_experts"] for row in rows(killed)] == [row["routed_experts"] for row in rows(run)]
    assert final_weights(killed) == final_weights(run)
    replayed = workplace.call("replay", "a", "--root", str(tmp_path / "killed"), "--from", "0", "--to", "2")
    assert "equal" in replayed
