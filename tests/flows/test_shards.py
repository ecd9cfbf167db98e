"""A run whose tasks work in shards, as Ray tasks: the same run as one that its driver makes alone, whatever is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak import victims
from tests.support.flow_runs import Workplace, generated
from tests.support.shard_runs import IN_SHARDS, Held, assert_like, evaluated

MANY = {
    "name": "held_out",
    "path": "held_out.jsonl",
    "samples_per_prompt": 4,
    "sampling": {"max_new_tokens": 16},
}
SEVERAL_PARTS = (
    f"evaluation.sets={json.dumps([MANY])}",
    "rollout.part_groups=1",
)  # of an evaluation, a shard


@pytest.mark.slow
def test_a_run_in_shards_trains_the_same_samples_to_the_same_weights(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    out = workplace.train(tmp_path, *IN_SHARDS)
    assert "3 iterations complete, 3 of them now" in out
    assert_like(tmp_path / "a", whole)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["rollout", "reward"])
def test_a_shard_that_is_killed_is_started_again_and_makes_the_rest(
    workplace: Workplace, whole: Path, tmp_path: Path, task: str
) -> None:
    run = Held(workplace, tmp_path, task)
    run.kill_shard()
    out = run.to_the_end()
    assert f"of {task}: its process died" in out
    assert "3 iterations complete, 3 of them now" in out
    assert_like(run.root / "a", whole)


@pytest.mark.slow
def test_a_board_that_is_killed_is_made_again_and_nothing_is_generated_twice(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    run = Held(workplace, tmp_path, "rollout")
    home = Path(workplace.environment["MILLRACE_HOME"])
    assert len(victims.kill("board", run.process.pid, home)) == 1
    assert "3 iterations complete, 3 of them now" in run.to_the_end()
    assert_like(run.root / "a", whole)


@pytest.mark.slow
def test_shards_end_with_their_driver_and_the_next_driver_starts_others(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    run = Held(workplace, tmp_path, "rollout")
    run.kill_driver()
    before = generated(run.root / "a")
    assert before
    out = workplace.train(run.root, *IN_SHARDS)
    assert "3 iterations complete, 2 of them now" in out
    assert generated(run.root / "a") >= before
    assert_like(run.root / "a", whole)


@pytest.mark.slow
def test_a_run_goes_on_in_shards_and_without(workplace: Workplace, whole: Path, tmp_path: Path) -> None:
    run = Held(workplace, tmp_path, "rollout")
    run.kill_driver()
    out = workplace.train(run.root, "engines.count=2")
    assert "3 iterations complete, 2 of them now" in out
    assert_like(run.root / "a", whole)


@pytest.mark.slow
def test_a_run_ahead_of_its_trainer_is_in_shards_what_it_is_without(
    workplace: Workplace, tmp_path: Path
) -> None:
    ahead = ("pipeline.ahead=1", "pipeline.on_update=finish", "algorithm.correction.kind=truncate")
    workplace.train(tmp_path / "alone", *ahead)
    workplace.train(tmp_path / "shards", *ahead, *IN_SHARDS)
    assert_like(tmp_path / "shards" / "a", tmp_path / "alone" / "a")


@pytest.fixture(scope="module")
def whole_with_many(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that its driver makes alone, whose evaluations are of several parts."""
    root = tmp_path_factory.mktemp("many")
    workplace.train(root, *SEVERAL_PARTS)
    return root / "a"


@pytest.mark.slow
def test_a_shard_of_an_evaluation_that_is_killed_is_started_again_and_makes_the_rest(
    workplace: Workplace, whole_with_many: Path, tmp_path: Path
) -> None:
    run = Held(workplace, tmp_path, "evaluate", *SEVERAL_PARTS)
    run.kill_shard()
    out = run.to_the_end()
    assert "of evaluate: its process died" in out
    assert_like(run.root / "a", whole_with_many)
    assert len(list((run.root / "a/iterations/000001/evaluations").iterdir())) > 2


@pytest.mark.slow
def test_an_evaluation_whose_driver_is_killed_goes_on_from_the_parts_of_its_shards(
    workplace: Workplace, whole_with_many: Path, tmp_path: Path
) -> None:
    run = Held(workplace, tmp_path, "evaluate", *SEVERAL_PARTS)
    run.kill_driver()
    before = evaluated(run.root / "a")
    assert any(version == 4 for _, version, _, _ in before)
    workplace.train(run.root, *IN_SHARDS, *SEVERAL_PARTS)
    assert evaluated(run.root / "a") >= before
    assert_like(run.root / "a", whole_with_many)
    assert not list((run.root / "a").glob("iterations/*/held_out.parquet"))


@pytest.mark.slow
def test_an_evaluation_in_the_background_is_in_shards_what_it_is_without(
    workplace: Workplace, tmp_path: Path
) -> None:
    """Its shards work beside those of the batch, at other weights: the run is ahead of its trainer."""
    ahead = ("pipeline.ahead=1", "pipeline.on_update=finish", "algorithm.correction.kind=truncate")
    every = (*SEVERAL_PARTS, "evaluation.every=1", "evaluation.background=true")
    workplace.train(tmp_path / "alone", *ahead, *every)
    workplace.train(tmp_path / "shards", *ahead, *every, *IN_SHARDS)
    assert_like(tmp_path / "shards" / "a", tmp_path / "alone" / "a")
    records = list((tmp_path / "shards" / "a").glob("iterations/*/results/evaluate_before.json"))
    assert len(records) == 3
