"""Every preset has a recipe: each is sound, and those with parts of their own (critic, teacher, dynamic sampling) run whole.

What the recipes promise of learning is held by the slow tests, which are left out unless asked for:
    python -m pytest -m slow tests/flows/test_presets.py
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest
from flow_runs import Workplace

from core.config.load import load_config
from core.config.presets import PRESETS, Preset
from flows.check import check
from flows.quickstart import recipe

REPOSITORY = Path(__file__).parents[2]
MEASURED = json.loads((REPOSITORY / "benchmarks" / "results" / "presets.json").read_text())
PROMISE = re.compile(r"^# expected: held-out reward ([\d.]+) -> ([\d.]+) in (\d+) iterations, (\d+) s", re.M)
NOISE = 0.08  # of a held-out reward, over machines: 800 samples, and a short run is chaotic in its rounding

GUARDED = ("ratio_mean", "ratio_distance", "approx_kl")
CRITIC = ("value_loss", "value_explained", "critic_grad_norm", "critic_lr")
SMALL = {
    "ppo": ["algorithm.critic.lr=1e-3"],
    "opd": ["algorithm.teacher=teacher"],
    "dapo": ["filter.drop_zero_variance=true"],
}


def test_every_preset_has_a_recipe_and_a_measurement() -> None:
    assert set(get_args(Preset)) == set(PRESETS) == set(MEASURED)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_recipe_is_sound(preset: str, tmp_path: Path) -> None:
    config = load_config(recipe(preset), [f"storage.root={tmp_path}"])
    assert config.algorithm.preset == preset
    assert config.algorithm.on_policy_guard
    assert check(config, made_later=True) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_a_recipe_promises_what_was_measured(preset: str) -> None:
    before, after, iterations, seconds = promise(preset)
    found = MEASURED[preset]
    assert iterations == found["iterations"] == load_config(recipe(preset)).run.iterations
    assert (before, after) == (round(found["before"], 2), round(found["after"], 2))
    assert seconds == round(found["seconds"], -1)


def promise(preset: str) -> tuple[float, float, int, int]:
    """Held-out reward before and after, iterations and seconds, as the recipe's header has them."""
    found = PROMISE.search(Path(recipe(preset)).read_text())
    assert found, f"the recipe of {preset} says nothing of what to expect"
    return float(found[1]), float(found[2]), int(found[3]), int(found[4])


@pytest.fixture(scope="module")
def steps(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Two short iterations of each of SMALL from a random model: figures of their steps by preset."""
    from connectors.huggingface.tiny import build_tiny_model

    build_tiny_model(workplace.folder / "teacher", seed=1)
    return {
        preset: run_small(workplace, tmp_path_factory.mktemp(preset), preset, *changed)
        for preset, changed in SMALL.items()
    }


def run_small(workplace: Workplace, root: Path, preset: str, *changed: str) -> list[dict[str, Any]]:
    """Train two iterations of two steps each; the steps' figures."""
    workplace.train(root, f"algorithm.preset={preset}", "run.iterations=2", *changed)
    folders = sorted((root / "a" / "iterations").iterdir())
    return [step for folder in folders for step in json.loads((folder / "step.json").read_text())["steps"]]


@pytest.mark.parametrize("preset", SMALL)
def test_every_figure_of_a_run_is_finite(steps: dict[str, list[dict[str, Any]]], preset: str) -> None:
    assert len(steps[preset]) == 4
    for step in steps[preset]:
        numbers = {name: value for name, value in step.items() if isinstance(value, int | float)}
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert step["grad_norm"] > 0


@pytest.mark.parametrize("preset", SMALL)
def test_the_first_step_on_fresh_samples_has_a_ratio_of_exactly_one(
    steps: dict[str, list[dict[str, Any]]], preset: str
) -> None:
    for first, second in zip(steps[preset][::2], steps[preset][1::2], strict=True):
        assert (first["ratio_mean"], first["ratio_distance"]) == (1.0, 0.0)
        assert abs(first["approx_kl"]) < 1e-9
        assert second["ratio_distance"] > 0


def test_ppo_trains_its_critic(steps: dict[str, list[dict[str, Any]]]) -> None:
    assert all(set(CRITIC) <= set(step) for step in steps["ppo"])
    assert all(step["critic_grad_norm"] > 0 and step["critic_lr"] == 1e-3 for step in steps["ppo"])
    assert steps["ppo"][-1]["value_mean"] != 0.0


def test_a_teacher_makes_the_advantages_of_opd(steps: dict[str, list[dict[str, Any]]]) -> None:
    assert all(step["advantage_mean"] == pytest.approx(-step["teacher_kl"]) for step in steps["opd"])
    assert all(step["teacher_kl"] != 0 for step in steps["opd"])


def test_dynamic_sampling_draws_until_the_batch_has_something_to_compare(
    steps: dict[str, list[dict[str, Any]]], workplace: Workplace, tmp_path: Path
) -> None:
    run_small(workplace, tmp_path, "dapo", *SMALL["dapo"])
    for folder in sorted((tmp_path / "a" / "iterations").iterdir()):
        drawn = pq.read_table(folder / "prompts.parquet").num_rows
        assert drawn > 8


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the slow tests make the warm model once."""
    return tmp_path_factory.mktemp("learnt")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_learns_what_its_recipe_promises(preset: str, learnt: Path) -> None:
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    from presets import measure

    before, after, iterations, _ = promise(preset)
    found = measure(learnt, preset, iterations, seed=0)
    assert found["before"] == pytest.approx(before, abs=NOISE)
    assert found["after"] >= after - NOISE
    assert found["after"] > found["before"] + NOISE / 2
