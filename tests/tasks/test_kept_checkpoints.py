"""Which checkpoints stay where an evaluation is of the iteration after, and manifests come later than the next save."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.connectors.storage.run_folder import COMPLETE, RunFolder
from millrace.core.config import RunConfig
from millrace.tasks.checkpoint import _retain, begins_after

MEANS = {1: 0.4, 2: 0.9, 3: 0.1, 4: 0.2}  # by iterations trained


def evaluate(folder: RunFolder, done: int, background: bool) -> None:
    """Record an evaluation in the iteration that made the weights, or in the one that begins with them."""
    record = {"version": done, "done": done, "sets": {"sums": {"reward_mean": MEANS[done]}}, "seconds": 0.0}
    index, task = (done, "evaluate_before") if background else (done - 1, "evaluate")
    folder.iteration(index).write_sealed(f"results/{task}.json", {"result": json.dumps(record)})


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("metric", "stay"),
    [("eval/sums/reward_mean", [{1}, {1, 2}, {2, 3}, {2, 4}]), (None, [{1}, {2}, {3}, {4}])],
)
def test_the_best_stays_whichever_iteration_evaluates_it(
    make_config: Callable[..., RunConfig], metric: str | None, stay: list[set[int]], background: bool
) -> None:
    """No manifest is written yet: with iterations ahead a later one may save before those before it are published."""
    sets = [{"name": "sums", "path": "held_out.jsonl"}]
    checkpoint = {"every": 1, "keep_last": 1, "keep_best": metric}
    config = make_config(run={"iterations": 9}, checkpoint=checkpoint, evaluation={"sets": sets, "every": 1})
    folder = RunFolder(config.storage.root, config.run.name)
    ctx: Any = SimpleNamespace(config=config, run_folder=folder)
    for done, expected in enumerate(stay, 1):
        folder.store.write(f"{folder.checkpoint_path(done)}/{COMPLETE}", b"{}")
        if done > 1:
            evaluate(folder, done - 1, background)  # before the sync, and so before this save
        _retain(ctx)
        assert set(folder.complete_checkpoints()) == expected


@pytest.mark.parametrize(
    ("checkpoint", "after"),
    [
        ({"every": 2}, [2, 4, 5]),
        ({"every": 100}, [5]),
        ({"every": 4, "export_every": 3}, [3, 4, 5]),
        ({"every": 1}, [1, 2, 3, 4, 5]),
    ],
)
def test_a_checkpoint_or_an_export_begins_after_these_iterations(
    make_config: Callable[..., RunConfig], checkpoint: dict[str, Any], after: list[int]
) -> None:
    config = make_config(run={"iterations": 5}, checkpoint=checkpoint)
    assert [done for done in range(1, 6) if begins_after(config, done)] == after
