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
from tests.soak.forms import FORMS, MODULES, TAILED, overrides, tailed_rows
from tests.soak.rollouts import NOTES
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


@pytest.mark.slow
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


PPO = ["algorithm.preset=ppo", "algorithm.advantage.critic.lr=1e-3", "algorithm.kl_coef=0.1"]
TEACHER = ["algorithm.distillation_coef=0.5", "algorithm.teacher=model"]
BESIDE = {
    **{
        form: overrides(form)
        for form in ("tool", "restart", "sent_again", "deferred", "deferred_ahead", "deferred_shards")
    },
    **{form: overrides(form) for form in ("eager", "passes", "reuse", "shards")},
    "kept": [*overrides("sent_again"), "pipeline.on_update=keep"],
    "critic, reference": PPO,
    "dense teacher": TEACHER,
}


@pytest.mark.parametrize(
    "form",
    [name if name == "deferred_ahead" else pytest.param(name, marks=pytest.mark.slow) for name in BESIDE],
)
def test_replay_goes_with_other_features(
    workplace: Workplace, model: Path, tmp_path: Path, form: str
) -> None:
    """Each sample has its rows, however it was made, and steps that are made again have the same bits."""
    for name, text in MODULES.items():
        (workplace.folder / name).write_text(text)
    (workplace.folder / TAILED).write_text(tailed_rows())
    workplace.environment[NOTES] = str(tmp_path / "notes.txt")
    run = tmp_path / "a"
    out = workplace.train(tmp_path, f"model.path={model}", REPLAY, *BESIDE[form])
    assert not failures(run), out
    if form in FORMS:
        assert FORMS[form].at_work(run)
    check_rows(run, model)
    assert all(0.5 < step["routing_agreement"] <= 1 for step in steps(run))
    assert "equal" in workplace.call("replay", "a", "--root", str(tmp_path), "--from", "0", "--to", "3")
