"""What people see of an iteration: its log line and artifacts name it by a number from 1."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.evaluation import evaluation_metrics
from millrace.core.tracker import Tracker
from millrace.tasks.context import IterationContext
from millrace.tasks.reporting import report
from millrace.tasks.reporting.report import _headline, _key, _name, run_tags
from millrace.tasks.runtime.tracking import Trackers


def test_the_last_iteration_is_n_of_n(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    folder = RunFolder(config.storage.root, config.run.name)
    runtime: Any = SimpleNamespace(run_folder=folder, config=config)
    assert _name(IterationContext(runtime, config.run.iterations - 1)) == "iteration 2 of 2"


@pytest.mark.parametrize(
    ("sections", "preset"),
    [({}, "grpo"), ({"algorithm": {"preset": "dapo"}}, "dapo"), ({"algorithm": {"loss": "sft"}}, "sft")],
)
def test_flow_runs_have_tags_of_run_preset_and_model(
    make_config: Callable[..., RunConfig], sections: dict[str, Any], preset: str
) -> None:
    config = make_config(model={"path": "models/Qwen3-0.6B/"}, **sections)
    assert run_tags(config) == {"run:a", f"preset:{preset}", "model:Qwen3-0.6B"}


def test_pages_name_the_command_that_shows_the_samples(tmp_path: Path) -> None:
    root = str(tmp_path / "my runs")
    assert report.samples_page(RunFolder("runs", "a")) == "`millrace view a`"
    assert report.samples_page(RunFolder(root, "a"), 1) == f"`millrace view a --root '{root}'`, at `/a/2`"


def test_the_log_line_has_the_figures_that_there_are() -> None:
    metrics = {"reward/mean": 0.25, "eval/sums/reward_mean": 0.5, "eval/sums/samples": 10.0}
    assert _headline(metrics) == "reward 0.25, sums 0.500"
    unscored = _headline(metrics | {"eval/sums/unscored": 2.0})
    assert unscored == "reward 0.25, sums 0.500 (2 unscored, counted as wrong)"


def test_figures_of_subsets_have_their_names() -> None:
    """Once three figures were printed as of one set."""
    part: Any = {"reward_mean": 0.5, "samples": 2, "pass_at": {}}
    subsets = {"Algebra": part, "Counting & Probability": part, "a/b": part}
    record: Any = {"sets": {"test": {**part, "subsets": subsets}}}
    line = _headline(evaluation_metrics(record))
    assert line == "test 0.500, test/Algebra 0.500, test/Counting & Probability 0.500, test/a%2Fb 0.500"


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        ({}, "0.001"),
        ({"train/logprob_gap_share": 0.3}, "0.001"),
        ({"train/logprob_gap_share": 0.0}, "not measured"),
    ],
)
def test_a_gap_of_no_token_is_not_shown_as_none(share: dict[str, float], shown: str) -> None:
    assert _headline({"train/logprob_gap_mean": 0.001, **share}) == f"log-prob gap {shown}"


def test_a_supervised_iterations_line_has_loss_and_tokens() -> None:
    metrics = {"train/loss": 0.523, "train/grad_norm": 1.5, "train/tokens": 12345.0, "time/train_step_s": 2.0}
    assert _headline(metrics, supervised=True) == (
        "loss 0.523, grad norm 1.5, tokens a step 12,345, train s 2"
    )


def test_two_runs_of_one_name_share_no_artifact(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Under two storage roots on one Prefect server, of whatever ids: a copied run has its original's."""

    def key(root: str, run_id: str) -> str:
        folder = RunFolder(str(tmp_path / root), "of.one_name")
        runtime: Any = SimpleNamespace(run_folder=folder, run_id=run_id, config=make_config())
        return _key(runtime, "progress")

    keys = [key("one", "1" * 32), key("two", "2" * 32), key("copy", "1" * 32)]
    assert len(set(keys)) == 3
    assert all(re.fullmatch("of-one-name-[0-9a-f]{12}-progress", name) for name in keys)
    assert key("one", "1" * 32) == keys[0]


def test_every_artifact_has_such_a_key() -> None:
    made = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(report)))
        if isinstance(node, ast.Call)
        and re.search(r"acreate_\w+_artifact$|page\.show$", ast.unparse(node.func))
    ]
    assert len(made) == 6
    for call in made:
        keys = [ast.unparse(item.value) for item in call.keywords if item.arg == "key"]
        key = keys[0] if keys else ast.unparse(call.args[0])
        assert key.startswith(("_key(runtime, ", "_key(ctx.runtime, "))


async def test_trackers_get_a_figure_that_may_always_be_0_once_it_is_not(
    make_config: Callable[..., RunConfig],
) -> None:
    """Also of a run that goes on: what its iterations held is read first."""
    logged: list[dict[str, float]] = []
    tracking = Trackers(make_config())
    tracking.trackers["tensorboard"] = cast(
        Tracker, SimpleNamespace(log_metrics=lambda metrics, step: logged.append(dict(metrics)))
    )
    tracking.curves.add({"rollout/failed": 2.0}, 1)
    zeros = {"reward/mean": 0.0, "eval/sums/failed": 0.0, "rollout/failed": 0.0, "rollout/aborted": 0.0}
    await tracking.log_metrics(zeros, 2)
    await tracking.log_metrics({**zeros, "rollout/aborted": 1.0}, 3)
    await tracking.log_metrics(zeros, 4)
    names = ["reward/mean", "eval/sums/failed", "rollout/failed"]
    assert [list(metrics) for metrics in logged] == [
        names,
        [*names, "rollout/aborted"],
        [*names, "rollout/aborted"],
    ]
