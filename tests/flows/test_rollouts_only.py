"""A run of rollouts alone: killed once, it has each sample once, all of the weights at model.path, and nothing of a trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millrace.core.errors import StorageError
from millrace.flows.commands.replay import replay_run
from millrace.flows.commands.verify import verify_run
from tests.support.flow_runs import Workplace, generated, trained

pytestmark = pytest.mark.slow  # some minutes of whole runs and processes

ONLY = ("pipeline.rollouts_only=true", "run.iterations=2", "evaluation.sets=[]")


@pytest.fixture(scope="module")
def run(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rollouts")
    parts = root / "a" / "iterations" / "000001" / "rollouts"
    workplace.train_and_kill(root, lambda: any(parts.glob("part-*")), *ONLY)
    assert "2 iterations complete, 1 of them now" in workplace.train(root, *ONLY)
    return root / "a"


def test_each_sample_is_made_and_scored_once_and_the_run_verifies(run: Path) -> None:
    counts = generated(run)
    assert len(counts) >= 2 * 8 * 4
    assert set(counts.values()) == {1}
    rows = [row for part in run.glob("iterations/*/batch.parquet") for row in pq.read_table(part).to_pylist()]
    assert len(rows) == 2 * 8 * 4
    assert all(row["scoring"] == "scored" and row["reward"] is not None for row in rows)
    verdict = verify_run(str(run.parent), "a")
    assert verdict.problems == verdict.strangers == []


def test_it_has_no_trainer_and_trains_nothing(run: Path) -> None:
    assert not (run / "checkpoints").exists()
    assert not (run / "exports").exists()
    assert [path.name for path in (run / "logs").rglob("*trainer*")] == []
    for index in range(2):
        steps = json.loads((run / f"iterations/{index:06d}/step.json").read_text())["steps"]
        assert [set(step) for step in steps] == [{"version", "samples"}] * 2
    with pytest.raises(StorageError, match="has rollouts only"):
        replay_run(str(run.parent), "a", 0, 1)


def test_both_iterations_sample_from_the_same_weights(run: Path) -> None:
    """A prompt's first answer tokens are as likely in the second iteration as the model at model.path has them."""
    first, second = (
        pq.read_table(run / f"iterations/{index:06d}/batch.parquet").to_pylist() for index in range(2)
    )
    seen = {(*row["tokens"][: len(row["tokens"]) - row["response_length"] + 1],): row for row in first}
    same = [
        (row["rollout_logprobs"][0], seen[key]["rollout_logprobs"][0])
        for row in second
        if (key := (*row["tokens"][: len(row["tokens"]) - row["response_length"] + 1],)) in seen
    ]
    assert all(abs(one - other) < 1e-5 for one, other in same)


def test_what_it_stored_trains_as_a_training_run_does(workplace: Workplace, run: Path, whole: Path) -> None:
    """The first iteration of a training run has the same weights to generate with, and so the same rollouts."""
    overrides = ("pipeline.rollouts_from=a", "evaluation.sets=[]", "run.name=b", "run.iterations=1")
    workplace.train(run.parent, *overrides)
    assert trained(run.parent / "b") == trained(whole)[: 8 * 4]
    made, stored = (
        json.loads((of / "iterations/000000/step.json").read_text())["steps"]
        for of in (run.parent / "b", whole)
    )
    assert [(step["loss"], step["grad_norm"]) for step in made] == [
        (step["loss"], step["grad_norm"]) for step in stored
    ]
    assert verify_run(str(run.parent), "b").problems == []
