"""Which runs another may take its rollouts from, and which fields must be as they made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.flows.driver.rollouts_source import source_problems
from tests.support.stored_run import CONFIG, write_run

HINT = {"url": "http://host", "model": "m"}
FIXED: dict[str, dict[str, Any]] = {
    "run.seed": {"run": {"seed": 3}},
    "model.path": {"model": {"path": "another"}},
    "data.max_prompt_tokens": {"data": {"max_prompt_tokens": 7}},
    "rollout.sampling.temperature": {"rollout": {"sampling": {"temperature": 0.5}}},
    "rollout.session": {"rollout": {"session": {"function": "m:f"}}},
    "reward.function": {"reward": {"function": "m:f"}},
    "algorithm.teacher_server": {"algorithm": {"teacher_server": HINT, "distillation_coef": 0.1}},
    "trainer.global_batch": {"trainer": {"global_batch": 2}},
    "run.iterations": {"run": {"iterations": 3}},
}
FREE: list[dict[str, Any]] = [
    {"trainer": {"optimizer": {"lr": 1e-3}}},
    {"trainer": {"passes": 2, "global_batch": 4}, "_source": {"trainer": {"global_batch": 2}}},
    {"trainer": {"world_size": 2, "parallel": {"tensor": 2}}},
    {"algorithm": {"preset": "dr_grpo", "correction": {"kind": "truncate"}}},
    {"filter": {"drop_zero_variance": True}},
    {"model": {"dtype": "bfloat16"}},
    {"rollout": {"part_groups": 1}},
    {"reward": {"workers": 3}},
    {"checkpoint": {"every": 7}},
]
NO_SOURCE: dict[str, dict[str, Any]] = {
    "supervised": {"algorithm": {"loss": {"kind": "sft"}}},
    "deferred groups": {"pipeline": {"select": "finish"}},
    "rollout.buffer": {"rollout": {"buffer": {}}},
}


def config(name: str, root: str, sections: dict[str, Any]) -> RunConfig:
    values = {
        section: {**CONFIG.get(section, {}), **sections.get(section, {})} for section in {*CONFIG, *sections}
    }
    values["run"] = {"name": name, "iterations": 2, **sections.get("run", {})}
    return RunConfig.model_validate({**values, "storage": {"root": root}, "evaluation": {}})


def found(root: Path, ours: dict[str, Any], source: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    if source is not None:
        store = RunFolder(str(root), "a").store
        record = store.read_sealed("run.json")
        store.write_sealed(
            "run.json", {**record, "config": config("a", str(root), source).model_dump(mode="json")}
        )
    pipeline = {**ours.get("pipeline", {}), "rollouts_from": "a"}
    return [
        (p.field, p.reason) for p in source_problems(config("b", str(root), {**ours, "pipeline": pipeline}))
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(str(tmp_path))
    return tmp_path


def test_a_run_of_the_same_configuration_gives_its_rollouts(root: Path) -> None:
    assert found(root, {}) == []


@pytest.mark.parametrize("field", FIXED)
def test_what_rollouts_were_made_by_may_not_differ(root: Path, field: str) -> None:
    ((named, reason),) = found(root, FIXED[field])
    assert named == field
    assert " a " in f"{reason} "


@pytest.mark.parametrize("sections", FREE, ids=str)
def test_the_trainer_and_the_filter_may(root: Path, sections: dict[str, Any]) -> None:
    ours = {name: values for name, values in sections.items() if name != "_source"}
    assert found(root, ours, sections.get("_source")) == []


@pytest.mark.parametrize("which", NO_SOURCE)
def test_runs_whose_iterations_are_not_whole_in_themselves_are_refused(root: Path, which: str) -> None:
    problems = found(root, {}, NO_SOURCE[which])
    assert problems[0][0] == "pipeline.rollouts_from"
    assert which in problems[0][1]


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    ((field, reason),) = found(tmp_path, {})
    assert field == "pipeline.rollouts_from"
    assert "no such run" in reason


def test_other_files_of_the_model_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text("{}")
    store = RunFolder(str(root), "a").store
    prints = {"model": {"model.path: config.json": "0"}, "code": {}}
    store.write_sealed("run.json", {**store.read_sealed("run.json"), "fingerprints": prints})
    ((field, reason),) = found(root, {})
    assert field == "model.path"
    assert "config.json" in reason
