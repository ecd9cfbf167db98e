"""Every preset has a recipe: each is sound, and those with extra parts (critic, teacher, dynamic sampling) run end to end.

What the recipes promise of learning, and dynamic sampling, is held by the slow tests, which are left out unless asked for:
    python -m pytest -m slow tests/flows/test_presets.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest

from benchmarks.presets import measure
from millrace.core.config.algorithm.presets import PRESETS, Preset
from millrace.core.config.reading.load import load_config
from millrace.flows.preflight.check import check
from millrace.flows.quickstart import recipe
from tests.support.flow_runs import Workplace
from tests.support.metric_names import unexplained

REPOSITORY = Path(__file__).parents[2]
MEASURED = json.loads((REPOSITORY / "benchmarks" / "results" / "cpu" / "presets.json").read_text())
PROMISE = re.compile(r"^# expected: held-out reward ([\d.]+) -> ([\d.]+) in (\d+) iterations, (\d+) s", re.M)
NOISE = 0.08  # of a held-out reward, over machines: 800 samples, and a short run is chaotic in its rounding

CRITIC = ("value_loss", "value_explained", "critic_grad_norm", "critic_lr")
SMALL = {
    "ppo": ["algorithm.advantage.critic.lr=1e-3"],
    "opd": ["algorithm.teacher=teacher"],
    "dapo": ["filter.drop_zero_variance=true"],
}


def test_every_preset_has_a_recipe_and_a_measurement() -> None:
    assert set(get_args(Preset)) == set(PRESETS) == set(MEASURED)
    assert {tuple(row["seed"] for row in rows) for rows in MEASURED.values()} == {(0, 1, 2)}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_recipe_is_sound(preset: str, tmp_path: Path) -> None:
    config = load_config(recipe(preset), [f"storage.root={tmp_path}"])
    assert config.algorithm.preset == preset
    assert config.algorithm.on_policy_guard
    assert check(config) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_a_recipe_promises_what_was_measured(preset: str) -> None:
    before, after, iterations, seconds = promise(preset)
    found = next(row for row in MEASURED[preset] if row["seed"] == 0)
    assert iterations == found["iterations"] == load_config(recipe(preset)).run.iterations
    assert (before, after) == (round(found["before"], 2), round(found["after"], 2))
    assert seconds == round(found["seconds"], -1)


def promise(preset: str) -> tuple[float, float, int, int]:
    """Held-out reward before and after, iterations and seconds, as the recipe's header has them."""
    found = PROMISE.search(Path(recipe(preset)).read_text())
    assert found, f"the recipe of {preset} says nothing of what to expect"
    return float(found[1]), float(found[2]), int(found[3]), int(found[4])


@pytest.fixture(scope="module")
def small(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of two short iterations, of two steps each, of a preset of SMALL from a random model."""
    from millrace.connectors.huggingface.tiny import build_tiny_model

    build_tiny_model(workplace.folder / "teacher", seed=1)

    @cache
    def run(preset: str) -> Path:
        root = tmp_path_factory.mktemp(preset)
        workplace.train(root, f"algorithm.preset={preset}", "run.iterations=2", *SMALL[preset])
        return root / "a"

    return run


def steps(run: Path) -> list[dict[str, Any]]:
    """Figures of a run's steps, in order."""
    folders = sorted((run / "iterations").iterdir())
    return [step for folder in folders for step in json.loads((folder / "step.json").read_text())["steps"]]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ppo", "opd", "dapo"])
def test_every_figure_of_a_run_is_finite(small: Callable[[str], Path], preset: str) -> None:
    found = steps(small(preset))
    assert len(found) == 4
    for step in found:
        numbers = {name: value for name, value in step.items() if isinstance(value, int | float)}
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert step["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ppo", "opd", "dapo"])
def test_the_first_step_on_fresh_samples_has_a_ratio_of_exactly_one(
    small: Callable[[str], Path], preset: str
) -> None:
    found = steps(small(preset))
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert (first["ratio_mean"], first["ratio_distance"]) == (1.0, 0.0)
        assert abs(first["approx_kl"]) < 1e-9
        assert second["ratio_distance"] > 0


@pytest.mark.slow
def test_ppo_trains_its_critic(small: Callable[[str], Path]) -> None:
    found = steps(small("ppo"))
    assert all(set(CRITIC) <= set(step) for step in found)
    assert unexplained(f"train/{name}" for name in CRITIC) == []
    assert all(step["critic_grad_norm"] > 0 and step["critic_lr"] == 1e-3 for step in found)
    assert found[-1]["value_mean"] != 0.0


@pytest.mark.slow
def test_a_teacher_makes_the_advantages_of_opd(small: Callable[[str], Path]) -> None:
    assert unexplained(["train/teacher_kl"]) == []
    for step in steps(small("opd")):
        assert step["teacher_kl"] != 0
        assert step["advantage_mean"] == pytest.approx(-step["teacher_kl"])


@pytest.mark.slow
def test_dynamic_sampling_draws_until_the_batch_has_something_to_compare(
    small: Callable[[str], Path],
) -> None:
    for folder in sorted((small("dapo") / "iterations").iterdir()):
        verdicts = pq.read_table(folder / "verdicts.parquet").to_pylist()
        generated = {row["group_id"] for row in verdicts if row["verdict"] != "returned"}
        assert len(generated) > 8
        rewards: dict[str, set[float]] = {}
        for row in pq.read_table(folder / "batch.parquet", columns=["group_id", "reward"]).to_pylist():
            rewards.setdefault(row["group_id"], set()).add(row["reward"])
        assert len(rewards) == 8
        reserve_spent = len(generated) == 3 * 8
        assert reserve_spent or all(len(found) > 1 for found in rewards.values())


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the slow tests make the warm model once."""
    return tmp_path_factory.mktemp("learnt")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_learns_what_its_recipe_promises(preset: str, learnt: Path) -> None:
    before, after, iterations, _ = promise(preset)
    found = measure(learnt, preset, iterations, seed=0)
    assert found["before"] == pytest.approx(before, abs=NOISE)
    assert found["after"] >= after - NOISE
    assert found["after"] > found["before"] + NOISE / 2
