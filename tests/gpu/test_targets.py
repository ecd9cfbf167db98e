"""The published figures, measured again, and that the recipe for one GPU learns.

Figures depend on the host, its processors above all, so these are left out unless asked for:
    python -m pytest -m slow tests/gpu/test_targets.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.storage.run_folder import RunFolder
from millrace.flows.quickstart import recipe
from tests.support import flow_runs
from tests.support.flow_runs import Workplace

REPOSITORY = Path(__file__).parents[2]
LENGTH = "2048"
ITERATIONS, EDGE, RISE = 40, 10, 0.1  # mean reward of the last ten over that of the first; published: 0.27
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Measured = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """Runs a benchmark, which leaves its JSON where it is told last; the Prefect server that one starts is its own."""
    place = Workplace(tmp_path_factory.mktemp("targets"))
    environment = {**os.environ, "MILLRACE_HOME": place.environment["MILLRACE_HOME"]}

    def run(*command: str) -> dict[str, Any]:
        out = place.folder / "out.json"
        out.unlink(missing_ok=True)
        subprocess.run([sys.executable, *command, str(out)], cwd=REPOSITORY, env=environment, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    yield run
    place.call("server", "stop")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where benchmarks keep the models that they make."""
    return str(tmp_path_factory.mktemp("models"))


def test_weights_reach_the_engine_in_time(measured: Measured, models: str) -> None:
    found = measured("-m", "benchmarks.gpu.sync", "--shapes", "0.6b", "--models", models, "--out")
    assert found["0.6b"]["median_s"]["sync"] < 0.15


def test_rollouts_are_as_fast_as_plain_requests(measured: Measured, models: str) -> None:
    found = measured("-m", "benchmarks.gpu.rollout", "--rounds", "4", "--models", models, "--out")
    assert found["ratio_median"] >= 0.97


def test_an_iteration_goes_to_generation_and_training(measured: Measured, models: str) -> None:
    found = measured("-m", "benchmarks.gpu.end_to_end", "--lengths", LENGTH, "--models", models, "--out")
    assert found[LENGTH]["share"]["orchestration_s"] < 0.02
    assert found[LENGTH]["mean"]["logprob_gap_mean"] < 0.02


def test_the_trainer_uses_the_gpu(measured: Measured) -> None:
    found = measured("-m", "benchmarks.gpu.trainer", "--lengths", LENGTH, "--sides", "millrace", "--out")
    (result,) = found["results"]
    assert result["mfu"] >= 0.40


def test_the_recipe_for_one_gpu_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_runs, "PATIENCE_S", 1200)
    place = Workplace(tmp_path)
    try:
        place.call("train", recipe("one_gpu"), "run.name=learns", f"run.iterations={ITERATIONS}")
    finally:
        place.call("server", "stop")
    manifests = RunFolder(str(tmp_path / "runs"), "learns").manifests()
    rewards = [manifests[index].tasks["metrics"]["reward/mean"] for index in range(ITERATIONS)]
    assert statistics.mean(rewards[-EDGE:]) > statistics.mean(rewards[:EDGE]) + RISE
