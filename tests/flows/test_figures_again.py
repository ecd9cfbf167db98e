"""Every published figure of an iteration is what its files say, in each mode: computed again by code that imports nothing of millrace."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from tests.soak import forms, rollouts
from tests.support.engine_process import embedded_engine
from tests.support.figures_again import (
    FIGURES,
    FLOAT32,
    ONLY_MEASURED,
    Iteration,
    differing,
    figures_of,
    without_row,
)
from tests.support.flow_runs import Workplace
from tests.support.metric_names import PAGE

REWARD = """
from millrace import RewardResult


def parted(sample):
    digits = sum(letter.isdigit() for letter in sample.response)
    answer = next((letter for letter in sample.response if letter.isdigit()), "")
    return RewardResult(float(digits > 2), {"digits": float(digits), "odd": float(digits % 2)}, answer)
"""
ONE_STEP = ["trainer.global_batch=null", "trainer.store_logprobs=true"]
TEACHER = "http://teacher.invalid"
SUBSETS = "{name: held_out, path: subsets.jsonl, subset_key: kind"
MODES = {
    "two_steps": ["trainer.store_logprobs=true"],
    "one_step": ONE_STEP,
    "ahead": [*forms.overrides("ahead"), *ONE_STEP],
    "sent_again": [*forms.overrides("sent_again"), *ONE_STEP],
    "deferred": [*forms.overrides("deferred"), *ONE_STEP, "run.iterations=4"],
    "oversample": ["filter={drop_zero_variance: true, oversample: 0.5}", *ONE_STEP],
    "eager": forms.overrides("eager"),
    "reuse": [*forms.overrides("reuse"), *ONE_STEP, "run.iterations=4"],
    "tool": [*forms.overrides("tool"), *ONE_STEP],
    "environment": [*forms.overrides("stateless"), *ONE_STEP],
    "flushed": [*forms.overrides("flushed"), *ONE_STEP],
    "levels": [
        *forms.overrides("levels"),
        "data.stages=[{weights: {sums: 1}, iterations: 1}, {weights: {sums: 1, growing: 3}}]",
        *ONE_STEP,
    ],
    "mixture": [
        "data.sources=[{name: sums, path: train.jsonl}, {name: products, path: products.jsonl}]",
        "reward.function=figure_rewards:parted",
        f"evaluation.sets=[{SUBSETS}, samples_per_prompt: 4, sampling: {{max_new_tokens: 16}}}}]",
        "filter.max_truncated_share=0.9",
        *ONE_STEP,
    ],
    "sft": [
        "algorithm.loss=sft",
        "rollout.samples_per_prompt=1",
        "trainer.global_batch=4",
        f"evaluation.sets=[{SUBSETS}}}]",
        "data.stages=[{weights: {sums: 1}, iterations: 1}, {weights: {sums: 1}}]",
    ],
    "evaluation_ahead": [*forms.overrides("evaluation_ahead"), *ONE_STEP],
    "kl": ["algorithm.kl_coef=0.1", *ONE_STEP],
    "ppo": ["algorithm.preset=ppo"],
    "rollouts_only": ["pipeline.rollouts_only=true"],
    "served_teacher": [
        "algorithm.distillation_coef=0.5",
        f"algorithm.teacher_server={{url: '{TEACHER}', same_tokenizer: true}}",
        *ONE_STEP,
    ],
}


@pytest.fixture(scope="module")
def teacher(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a teacher: the model itself, served."""
    log = tmp_path_factory.mktemp("teacher") / "teacher.log"
    with embedded_engine(workplace.folder / "model", "--dtype", "float32", log=log) as (address, _):
        yield address


@pytest.fixture(scope="module")
def run_of(
    workplace: Workplace, teacher: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The finished run of a mode, made once."""
    for name, text in {
        **forms.MODULES,
        "figure_rewards.py": REWARD,
        forms.TAILED: forms.tailed_rows(),
    }.items():
        (workplace.folder / name).write_text(text)
    held = [json.loads(line) for line in (workplace.folder / "held_out.jsonl").read_text().splitlines()]
    kinds = [{**row, "metadata": {"kind": ("even", "odd")[at % 2]}} for at, row in enumerate(held)]
    products = [{"prompt": f"{a}*{b}=", "label": str(a * b % 10)} for a in range(10) for b in range(10)]
    for file, rows in (("subsets.jsonl", kinds), ("products.jsonl", products)):
        (workplace.folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path_factory.mktemp("figures")

    @cache
    def run(mode: str) -> Path:
        notes = {rollouts.NOTES: str(folder / "notes")}
        workplace.train(folder / mode, *(option.replace(TEACHER, teacher) for option in MODES[mode]), **notes)
        return folder / mode / "a"

    return run


def test_the_figures_of_a_run_are_what_its_files_say(whole: Path) -> None:
    wrong, names = differing(whole)
    assert not wrong
    assert {"reward/mean", "tokens/trained", "train/tokens", "eval/held_out/reward_mean"} <= names


def logged(workplace: Workplace, run: Path) -> dict[int, dict[str, float]]:
    """What MLflow holds of a run, by step; without the load of the host, and the curves that stand first on its page."""
    record = json.loads((run / "run.json").read_text())
    found: dict[int, dict[str, float]] = {}
    with closing(sqlite3.connect(workplace.folder / "home" / "mlflow.db")) as store:
        query = "select step, key, value from metrics where run_uuid = ?"
        for step, key, value in store.execute(query, (record["mlflow_run_id"],)):
            if not key.startswith(("system/", "0_overview/")):
                found.setdefault(step, {})[key] = value
    return found


def test_mlflow_has_the_figures_of_each_iteration_and_those_from_before_training(
    workplace: Workplace, whole: Path
) -> None:
    by_step = logged(workplace, whole)
    first = Iteration(whole, 0)
    first.done = 0
    before = by_step.pop(0)
    compared = list(figures_of(first, before))
    assert {"eval/held_out/reward_mean", "eval/held_out/samples"} <= {name for name, _, _ in compared}
    assert [
        name for name, logged_as, value in compared if not math.isclose(logged_as, value, **FLOAT32)
    ] == []
    for step, figures in by_step.items():
        published = {
            name.replace("@", "_at_"): value for name, value in Iteration(whole, step - 1).published.items()
        }
        always_zero = dict.fromkeys(published.keys() - figures.keys(), 0.0)
        assert figures | always_zero == pytest.approx(published)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_figures_of_each_mode_are_what_its_files_say(run_of: Callable[[str], Path], mode: str) -> None:
    wrong, names = differing(run_of(mode))
    assert not wrong
    assert names


@pytest.mark.slow
def test_each_computation_is_compared_in_some_mode(run_of: Callable[[str], Path]) -> None:
    names = set().union(*(differing(run_of(mode))[1] for mode in MODES))
    unused = {pattern for pattern in FIGURES if not any(re.fullmatch(pattern, name) for name in names)}
    assert unused == set()


def test_every_metric_of_the_page_is_computed_again_or_has_a_reason_why_not() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert listed
    numbers = [re.sub(r"(?<=@)[A-Z]+|(?<=_)K\b", "4", name) for name in listed]
    assert [name for name in numbers if without_row(re.sub("[A-Z]+", "a", name))] == []


@pytest.mark.parametrize("name", ["reward/new", "train/new", "tokens", "new/figure"])
def test_a_metric_that_nobody_computes_again_has_no_row(name: str) -> None:
    assert without_row(name)


def test_each_reason_is_a_sentence() -> None:
    assert all(len(reason.split()) > 3 for reason in ONLY_MEASURED.values())
