"""What people see of an iteration: its log line and artifacts name it by a number from 1."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.tasks.context import IterationContext
from millrace.tasks.report import _headline, _name, _summary


def test_the_last_iteration_is_n_of_n(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    folder = RunFolder(config.storage.root, config.run.name)
    tracking = SimpleNamespace(tracker=SimpleNamespace(url=lambda: "mlflow"))
    runtime: Any = SimpleNamespace(run_folder=folder, tracking=tracking)
    ctx = IterationContext(config, config.run.iterations - 1, runtime)
    assert _name(ctx) == "iteration 2 of 2"
    lines = _summary(ctx, {"reward/mean": 0.5, "time/rollout_s": 1.25, "other": 1.0}).splitlines()
    assert lines[0] == "# a: iteration 2 of 2"
    assert lines[4:6] == ["| reward/mean | 0.5 |", "| time/rollout_s | 1.25 |"]
    assert f"Files: `{folder.store.url}/iterations/000001`" in lines  # folders keep the index


def test_the_log_line_has_the_figures_that_there_are() -> None:
    metrics = {"reward/mean": 0.25, "eval/sums/reward_mean": 0.5, "eval/sums/samples": 10.0}
    assert _headline(metrics) == "reward 0.25, sums 0.500"
    unscored = _headline(metrics | {"eval/sums/unscored": 2.0})
    assert unscored == "reward 0.25, sums 0.500 (2 unscored, counted as wrong)"
