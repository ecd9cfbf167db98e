"""A run whose rollout and reward work in shards, as Ray tasks: the same run as one that its driver makes alone, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tests.soak import rollouts, victims
from tests.support.flow_runs import PATIENCE_S, Workplace, final_weights, generated, trained, wait_until

IN_SHARDS = ("placement.task_runner=ray", "rollout.shards=2", "engines.count=2")


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


class Held:
    """A run in two shards that waits where a shard has written a part of the second iteration's samples, of a batch or held out."""

    def __init__(self, workplace: Workplace, folder: Path, task: str, *overrides: str) -> None:
        self.root = folder / "runs"
        self.held = folder / "held"
        stop = {"MILLRACE_KILL_POINT": f"1/{task}/in", "MILLRACE_KILL_POINT_FILE": str(self.held)}
        arguments = ("train", "run.yaml", f"storage.root={self.root}", *IN_SHARDS, *overrides)
        self.process: subprocess.Popen[str] = workplace.start(*arguments, **stop)
        wait_until(self._is_held)
        assert self.process.poll() is None, self.process.communicate()[0]
        self.shard = psutil.Process(int(self.held.read_text()))
        assert self.shard.pid != self.process.pid

    def kill_shard(self) -> None:
        """`kill -9` of the process of the shard that waits."""
        self.shard.send_signal(signal.SIGKILL)
        self.shard.wait(timeout=20)

    def to_the_end(self) -> str:
        """Let go of it wherever it waits; what it printed."""
        wait_until(lambda: self._let_go() or self.process.poll() is not None)
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, out
        return out

    def _is_held(self) -> bool:
        written = self.held.exists() and self.held.read_text() != ""
        return written or self.process.poll() is not None

    def _let_go(self) -> bool:
        self.held.unlink(missing_ok=True)
        return False


def assert_like(run: Path, whole: Path) -> None:
    """The run trained the samples of the whole run to the same weights, evaluated alike, and generated none twice."""
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    assert max(generated(run).values()) == 1
    assert evaluations(run) == evaluations(whole)
    assert max(evaluated(run).values()) == 1


def evaluations(run: Path) -> dict[str, Any]:
    """The rows of each evaluation, and the figures that its record has of them."""
    found: dict[str, Any] = {
        str(path.relative_to(run)): pq.read_table(path).to_pylist()
        for path in (run / "eval").rglob("*.parquet")
    }
    for path in run.glob("iterations/*/results/evaluate*.json"):
        sets = json.loads(json.loads(path.read_text())["result"])["sets"]
        found[str(path.relative_to(run))] = {name: {**each, "file": None} for name, each in sets.items()}
    return found


def evaluated(run: Path) -> Counter[tuple[Any, ...]]:
    """How often each sample of a held-out set was generated and stored, in whatever part."""
    return Counter(
        (row["set"], row["version"], row["prompt_id"], row["index"])
        for path in run.glob("iterations/*/evaluations/part-*.parquet")
        for row in pq.read_table(path).to_pylist()
    )


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
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.communicate()
    wait_until(lambda: not run.shard.is_running(), patience_s=30)
    before = generated(run.root / "a")
    assert before
    out = workplace.train(run.root, *IN_SHARDS)
    assert "3 iterations complete, 2 of them now" in out
    assert generated(run.root / "a") >= before
    assert_like(run.root / "a", whole)


@pytest.mark.slow
def test_a_run_goes_on_in_shards_and_without(workplace: Workplace, whole: Path, tmp_path: Path) -> None:
    run = Held(workplace, tmp_path, "rollout")
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.communicate()
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
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.communicate()
    wait_until(lambda: not run.shard.is_running(), patience_s=30)
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


# what a rollout may be besides one answer that is stored when it is whole
TOOL = {**rollouts.SESSIONS["tool"], "max_tokens": 64, "max_turns": 4}
FORMS = {
    "session": (f"rollout.session={json.dumps(TOOL)}", "rollout.sampling.max_new_tokens=8"),
    "flush": ("rollout.flush_tokens=4", "rollout.sampling.max_new_tokens=32"),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, workplace: Workplace, tmp_path: Path) -> tuple[str, ...]:
    (workplace.folder / "soak_rollouts.py").write_text(rollouts.MODULE)
    workplace.environment[rollouts.NOTES] = str(tmp_path / "notes.txt")
    return FORMS[request.param]


def turns(run: Path) -> list[dict[str, Any]]:
    """What parts hold of turns and of answers under way, in the order of their parts' names."""
    paths = sorted(run.glob("iterations/*/turns/part-*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def generated_turns(run: Path) -> Counter[tuple[Any, ...]]:
    """How often each turn, or segment of an answer, was generated and stored."""
    return Counter(
        (row["rollout_id"], row["branch"], row["event"], row["segment"])
        for row in turns(run)
        if row["kind"] in ("segment", "answer")
    )


@pytest.mark.slow
def test_turns_are_stored_by_shards_and_those_of_one_that_is_killed_are_not_generated_again(
    workplace: Workplace, form: tuple[str, ...], tmp_path: Path
) -> None:
    workplace.train(tmp_path / "alone", *form)
    run = Held(workplace, tmp_path, "turns", *form)
    run.kill_shard()
    out = run.to_the_end()
    assert "of rollout: its process died" in out
    assert_like(run.root / "a", tmp_path / "alone" / "a")
    assert generated_turns(run.root / "a")
    assert max(generated_turns(run.root / "a").values()) == 1


@pytest.mark.slow
def test_turns_of_shards_whose_driver_is_killed_are_not_generated_again(
    workplace: Workplace, form: tuple[str, ...], tmp_path: Path
) -> None:
    workplace.train(tmp_path / "alone", *form)
    run = Held(workplace, tmp_path, "turns", *form)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.communicate()
    wait_until(lambda: not run.shard.is_running(), patience_s=30)
    before = generated_turns(run.root / "a")
    assert before
    workplace.train(run.root, *IN_SHARDS, *form)
    assert generated_turns(run.root / "a") >= before
    assert_like(run.root / "a", tmp_path / "alone" / "a")
    assert max(generated_turns(run.root / "a").values()) == 1


@pytest.mark.slow
def test_a_run_that_oversamples_trains_the_same_in_shards(workplace: Workplace, tmp_path: Path) -> None:
    more = ("filter.drop_zero_variance=true", "filter.refill_factor=1.0", "filter.oversample=0.5")
    workplace.train(tmp_path / "alone", *more)
    workplace.train(tmp_path / "shards", *more, *IN_SHARDS)
    alone, run = tmp_path / "alone" / "a", tmp_path / "shards" / "a"
    assert trained(run) == trained(alone)
    assert final_weights(run) == final_weights(alone)
