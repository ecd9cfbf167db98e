"""A run whose tasks work in shards, as Ray tasks: the same run as one that its driver makes alone, whatever is killed."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak import victims
from tests.support.flow_runs import PATIENCE_S, Workplace, generated, wait_until
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
    with _shards_wait(workplace, tmp_path) as process:
        pass
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert "3 iterations complete, 3 of them now" in out
    run = tmp_path / "runs" / "a"
    assert_like(run, whole)
    # those of the second iteration began before it: the third comes after an evaluation
    parent = json.loads((run / "run.json").read_text())["attempts"][-1]["flow_run_id"]
    began = {number: _began(workplace, parent, number) for number in (2, 3)}
    assert max(began[2][:2]) < began[2][2], began
    assert min(began[3][:2]) > began[3][2], began


@contextlib.contextmanager
def _shards_wait(workplace: Workplace, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Within, the first iteration of a run is held before its manifest, and the shards of the second have begun."""
    held, home = folder / "held", Path(workplace.environment["MILLRACE_HOME"])
    stop = {"MILLRACE_KILL_POINT": "0/publish/in", "MILLRACE_KILL_POINT_FILE": str(held)}
    process = workplace.start("train", "run.yaml", f"storage.root={folder / 'runs'}", *IN_SHARDS, **stop)
    wait_until(lambda: held.exists() or process.poll() is not None)
    wait_until(lambda: len(victims.processes("shard", process.pid, home)) == 4)  # two of each kind of work
    yield process
    held.unlink()


def _began(workplace: Workplace, parent: str, number: int) -> list[str]:
    """When the first shard of each kind and the draw of an iteration began, as Prefect's server has it some time after."""
    found: list[dict[str, str]] = []

    def are_there() -> bool:
        run = {"parent_flow_run_id": {"any_": [parent]}, "name": {"any_": [f"a, iteration {number}"]}}
        rows = workplace.ask("/task_runs/filter", {"flow_runs": run})
        began = sorted(
            (row["start_time"], row["name"].rpartition("-")[0]) for row in rows if row["start_time"]
        )
        found[:] = [{name: at for at, name in reversed(began)}]
        return {"rollout_shard", "reward_shard", "sample_prompts"} <= found[0].keys()

    wait_until(are_there, pause_s=0.2)
    return [found[0][name] for name in ("rollout_shard", "reward_shard", "sample_prompts")]


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
def test_shards_that_are_killed_while_they_wait_for_their_iteration_are_started_again(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    with _shards_wait(workplace, tmp_path) as process:
        home = Path(workplace.environment["MILLRACE_HOME"])
        assert len(victims.kill("shard", process.pid, home)) == 4
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out
    assert out.count("its process died") == 4, out
    assert "3 iterations complete, 3 of them now" in out
    assert_like(tmp_path / "runs" / "a", whole)


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
