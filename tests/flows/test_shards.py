"""A run whose rollout and reward work in shards, as Ray tasks: the same run as one that its driver makes alone, whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.soak import victims
from tests.support.flow_runs import Workplace, final_weights, generated, output_of, trained, wait_until

IN_SHARDS = ("placement.task_runner=ray", "rollout.shards=2", "engines.count=2")


class Held:
    """A run in two shards that waits where a shard has written a part of the second iteration's samples."""

    def __init__(self, workplace: Workplace, folder: Path, task: str) -> None:
        self.root = folder / "runs"
        self.held = folder / "held"
        stop = {"MILLRACE_KILL_POINT": f"1/{task}/in", "MILLRACE_KILL_POINT_FILE": str(self.held)}
        arguments = ("train", "run.yaml", f"storage.root={self.root}", *IN_SHARDS)
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
        out = output_of(self.process)
        assert self.process.returncode == 0, out
        return out

    def _is_held(self) -> bool:
        written = self.held.exists() and self.held.read_text() != ""
        return written or self.process.poll() is not None

    def _let_go(self) -> bool:
        self.held.unlink(missing_ok=True)
        return False


def assert_like(run: Path, whole: Path) -> None:
    """The run trained the samples of the whole run to the same weights, and generated none twice."""
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    assert max(generated(run).values()) == 1


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
