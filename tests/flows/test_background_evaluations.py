"""Evaluations beside the next iteration: the answers of those that are waited for, under the right version, and nobody waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.soak import forms, promises
from tests.support.flow_runs import Workplace, final_weights

ITERATIONS, STEPS = 4, 2
pytestmark = pytest.mark.slow

SCORE = "response_length_mean"
SETTINGS = [
    *forms.overrides("evaluation_ahead"),
    f"run.iterations={ITERATIONS}",
    "checkpoint.every=1",
    "checkpoint.keep_last=1",
    f"checkpoint.keep_best=eval/held_out/{SCORE}",
]


@pytest.fixture(scope="module")
def both(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A run that waits for its evaluations, and one that does not; else they are the same."""
    (workplace.folder / forms.TAILED).write_text(forms.tailed_rows())
    root = tmp_path_factory.mktemp("both")
    for name, background in (("waits", "false"), ("goes_on", "null")):
        workplace.train(root / name, *SETTINGS, f"evaluation.background={background}")
    return root / "waits" / "a", root / "goes_on" / "a"


def manifest(run: Path, index: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / f"iterations/{index:06d}/manifest.json").read_text())
    return content["tasks"]


def record(run: Path, index: int, task: str) -> dict[str, Any] | None:
    path = run / f"iterations/{index:06d}/results/{task}.json"
    return json.loads(json.loads(path.read_text())["result"]) if path.exists() else None


def test_a_run_that_does_not_wait_for_its_evaluations_gives_the_same_answers_under_the_same_versions(
    both: tuple[Path, Path],
) -> None:
    waits, goes_on = both
    for done in range(ITERATIONS + 1):
        file = f"eval/held_out/{done:06d}.parquet"
        rows = pq.read_table(goes_on / file).to_pylist()
        assert {row["version"] for row in rows} == {done * STEPS}
        assert rows == pq.read_table(waits / file).to_pylist()
    assert not promises.different_numbers(waits, goes_on)
    assert final_weights(waits) == final_weights(goes_on)


def test_the_manifest_says_of_which_weights_an_evaluation_is(both: tuple[Path, Path]) -> None:
    waits, goes_on = both
    for index in range(ITERATIONS):
        said = manifest(goes_on, index)["evaluated"]
        assert (said["done"], said["version"]) == (index, index * STEPS)
        assert (said["metrics"]["eval/held_out/samples"], said["metrics"]["eval/lag"] % STEPS) == (40, 0)
        last = index == ITERATIONS - 1
        assert (record(goes_on, index, "evaluate") is not None) == last, "the last is waited for"
        assert ("eval/held_out/samples" in manifest(goes_on, index)["metrics"]) == last
        assert "evaluated" not in manifest(waits, index)
        if index:
            before = manifest(waits, index - 1)["metrics"]
            assert before[f"eval/held_out/{SCORE}"] == said["metrics"][f"eval/held_out/{SCORE}"]


def test_the_best_checkpoint_is_kept_though_its_evaluation_ends_later(both: tuple[Path, Path]) -> None:
    for run in both:
        means = {}
        for done in range(1, ITERATIONS):
            lengths = pq.read_table(run / f"eval/held_out/{done:06d}.parquet")["response_length"].to_pylist()
            means[done] = sum(lengths) / len(lengths)
        best = min(means, key=lambda done: (-means[done], done))
        kept = {int(path.parent.name) for path in run.glob("checkpoints/*/complete.json")}
        assert kept == {best, ITERATIONS}
