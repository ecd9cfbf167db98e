"""Runs whose passes begin while their iteration is still generated: equal to themselves bit for bit, killed, delayed and replayed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.soak import forms, promises
from tests.soak.victims import processes
from tests.support.flow_runs import Workplace, final_weights

pytestmark = pytest.mark.slow
SETTINGS = [*forms.overrides("eager"), "run.iterations=4", "evaluation.sets=[]"]
IN_SHARDS = [f"{field}={value}" for field, value in forms.TWO_SHARDS.items()]


@pytest.fixture(scope="module")
def tailed(workplace: Workplace) -> Workplace:
    """The workplace with sums whose answers are of very different lengths, and the form's reward."""
    for name, text in {**forms.MODULES, forms.TAILED: forms.tailed_rows()}.items():
        (workplace.folder / name).write_text(text)
    return workplace


@pytest.fixture(scope="module")
def whole(tailed: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing delayed."""
    root = tmp_path_factory.mktemp("whole")
    tailed.train(root, *SETTINGS)
    return root / "a"


def metrics(run: Path) -> list[dict[str, float]]:
    manifests = sorted(run.glob("iterations/*/manifest.json"))
    return [json.loads(path.read_text())["tasks"]["metrics"] for path in manifests]


def steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["steps"][0] for path in sorted(run.glob("iterations/*/step.json"))]


def test_passes_are_made_while_answers_are_generated_and_nothing_is_left_of_them(whole: Path) -> None:
    assert all("time/eager_s" in row for row in metrics(whole))
    assert sum(row["time/eager_s"] for row in metrics(whole)) > 0
    assert all(len(step["chunks"]) > 2 and sum(step["chunks"]) == step["samples"] for step in steps(whole))
    assert not list(whole.glob("iterations/*/eager*"))


def test_the_first_step_is_that_of_a_run_without(tailed: Workplace, whole: Path, tmp_path: Path) -> None:
    plain = [text for text in SETTINGS if "pipeline." not in text]
    tailed.train(tmp_path, *plain, "run.iterations=1")
    ours, theirs = steps(whole)[0], steps(tmp_path / "a")[0]
    assert "chunks" not in theirs
    assert ours.keys() - {"chunks"} == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, float) and name != "tokens_per_second":
            power = (
                2 if name.endswith("_std") else 1
            )  # a deviation is the root of what sums, with their rounding, give
            assert ours[name] ** power == pytest.approx(value**power, rel=1e-6, abs=1e-6), name


def test_two_runs_are_equal_whichever_answers_finish_first(
    tailed: Workplace, whole: Path, tmp_path: Path
) -> None:
    process = tailed.start("train", "run.yaml", f"storage.root={tmp_path}", *SETTINGS)
    numbers = random.Random(2)
    home = Path(tailed.environment["MILLRACE_HOME"])
    while process.poll() is None:  # engine and trainer stand still now and then
        time.sleep(numbers.uniform(0.05, 0.3))
        for pid in processes(numbers.choice(["engine", "trainer"]), process.pid, home):
            try:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(numbers.uniform(0.02, 0.2))
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert not promises.different_numbers(whole, tmp_path / "a")
    assert final_weights(whole) == final_weights(tmp_path / "a")


def test_a_run_in_two_shards_is_equal_and_passes_early_too(
    tailed: Workplace, whole: Path, tmp_path: Path
) -> None:
    tailed.train(tmp_path, *SETTINGS, *IN_SHARDS)
    run = tmp_path / "a"
    assert sum(row["time/eager_s"] for row in metrics(run)) > 0
    assert not promises.different_numbers(whole, run)
    assert final_weights(whole) == final_weights(run)


def test_a_run_that_is_killed_amid_the_passes_is_equal_and_is_its_own_replay(
    tailed: Workplace, whole: Path, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    tailed.environment |= {
        "MILLRACE_KILL_POINT_FILE": str(reached),
        "MILLRACE_KILL_POINT": "1/eager_passes/in",
    }
    try:
        tailed.train_and_kill(tmp_path, reached.exists, *SETTINGS)
    finally:
        del tailed.environment["MILLRACE_KILL_POINT"]
    run = tmp_path / "a"
    assert list(run.glob("iterations/000001/eager/chunk-*"))
    assert not (run / "iterations/000001/batch.parquet").exists()
    tailed.train(tmp_path, *SETTINGS)
    assert not promises.different_numbers(whole, run)
    assert final_weights(whole) == final_weights(run)
    assert not promises.faulted_by_commands(tailed, run)
    assert not promises.replayed(tailed, run)
    assert not list(run.glob("iterations/*/eager*"))


def test_chunks_that_a_batch_was_cut_into_stay_when_the_setting_changes(
    tailed: Workplace, whole: Path, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    tailed.environment |= {"MILLRACE_KILL_POINT_FILE": str(reached), "MILLRACE_KILL_POINT": "1/filter/after"}
    try:
        tailed.train_and_kill(tmp_path, reached.exists, *SETTINGS)
    finally:
        del tailed.environment["MILLRACE_KILL_POINT"]
    tailed.train(tmp_path, *SETTINGS, "pipeline.eager=false", "pipeline.eager_groups=null")
    run = tmp_path / "a"
    assert steps(run)[:2] == [
        {**ours, "seconds": theirs["seconds"], "tokens_per_second": theirs["tokens_per_second"]}
        for ours, theirs in zip(steps(whole)[:2], steps(run), strict=False)
    ]
    assert ["chunks" in step for step in steps(run)] == [True, True, False, False]
    assert not promises.replayed(tailed, run)
