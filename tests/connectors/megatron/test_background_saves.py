"""Checkpoints that another process writes while the ranks train on: what they hold, and what becomes of them when writers fail."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.connectors.trainers.checkpoint.background import ROOM, BackgroundWriter
from millrace.core.config.algorithm import Algorithm
from tests.connectors.megatron.test_trainer_algorithms import figures, state, trained, urls
from tests.support.trainer_ranks import Group, RankFailedError, Workers, configuration

pytestmark = pytest.mark.slow  # some minutes of whole runs and processes

ALGORITHM: dict[str, Any] = {"preset": "ppo", "kl_coef": 0.1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "sharded": (2, {}),
    "replicated": (2, {"optimizer": {"distributed": False}}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
}
PATIENCE_S = 60


def writers(rank: Any) -> list[int]:
    """Processes that write for a rank. They take seconds to load their libraries before they write."""
    children = psutil.Process(os.getpid()).children()
    return [each.pid for each in children if "write_process" in " ".join(each.cmdline())]


def stop_writers(group: Group) -> list[int]:
    pids = [pid for rank in group.run(writers) for pid in rank]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def saving(rank: Any) -> Any:
    return rank.state()["saving"]


def wait_until_settled(group: Group) -> list[Any]:
    until = time.monotonic() + PATIENCE_S
    while any(each["state"] == "writing" for each in group.run(saving)):
        assert time.monotonic() < until
        time.sleep(0.1)
    return group.run(saving)


@pytest.fixture
def batches(tmp_path: Path) -> list[str]:
    return urls(tmp_path, Algorithm.model_validate(ALGORITHM))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_later_is_the_state_of_the_moment_it_was_begun(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, batches: list[str], layout: str
) -> None:
    world, changes = LAYOUTS[layout]
    settings = configuration(model(), world, algorithm=ALGORITHM, **changes)
    with workers.group(settings) as group:
        trained(group, batches[:2])
        group.call("save", str(tmp_path / "at once"))
        group.call("begin_save", str(tmp_path / "later"))
        stopped = stop_writers(group)
        assert len(stopped) == world
        on = trained(group, batches[2:], 3)
        assert [each["state"] for each in group.run(saving)] == ["writing"] * world
        assert not (tmp_path / "later" / "complete.json").exists()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert [(each["state"], each["reason"]) for each in wait_until_settled(group)] == [
            ("written", None)
        ] * world
        group.call("commit_save")
        assert group.run(saving) == [None] * world
        after = group.run(state)
    found = []
    for name in ("at once", "later"):
        with workers.group(settings) as group:
            assert group.call("load", str(tmp_path / name)) == [2] * world
            found.append(group.run(state))
            again = trained(group, batches[2:], 3)
            assert figures(again) == figures(on)
            assert group.run(state) == after
    assert found[0] == found[1]


def copied(rank: Any) -> tuple[int, int]:
    """Bytes of tensors that the rank said it would save, and those of the copy that it made."""
    return rank.learner.checkpoint_bytes, rank._background.memory.size


@pytest.mark.parametrize(
    "algorithm", [ALGORITHM, {"preset": "grpo"}, {"kl_coef": 0.1, "reference_update_steps": 2}]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_knows_how_much_it_will_save(
    workers: Workers,
    model: Callable[..., Path],
    tmp_path: Path,
    layout: str,
    dtype: str,
    algorithm: dict[str, Any],
) -> None:
    world, changes = LAYOUTS[layout]
    with workers.group(configuration(model(), world, algorithm=algorithm, dtype=dtype, **changes)) as group:
        group.call("begin_save", str(tmp_path / "a"))
        for expected, size in group.run(copied):
            # what tensor ranks hold alike the first one saves; small tensors end with up to 255 bytes of nothing
            assert 0.98 * expected <= size <= max(1.07 * expected, mmap.PAGESIZE)
        # writers take seconds to start: those of the other cases end unfinished
        if (layout, dtype) == ("one rank", "bfloat16"):
            wait_until_settled(group)
            group.call("commit_save")


def prepare(rank: Any) -> None:
    """What a rank on a GPU does at its start."""
    rank._background = BackgroundWriter(rank.config.part_limit)
    rank._background.prepare(rank.learner.checkpoint_bytes + ROOM, pinned=False)


def prepare_too_little(rank: Any) -> None:
    rank._background = BackgroundWriter(rank.config.part_limit)
    rank._background.prepare(4096, pinned=False)


def test_a_copy_that_is_larger_than_was_prepared_gets_a_writer_of_its_own(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, batches: list[str]
) -> None:
    with workers.group(configuration(model(), 1, algorithm=ALGORITHM)) as group:
        group.run(prepare_too_little)
        trained(group, batches[:1])
        (ahead,) = stop_writers(group)
        group.call("begin_save", str(tmp_path / "a"))
        assert ahead not in [pid for rank in group.run(writers) for pid in rank]
        assert [each["state"] for each in wait_until_settled(group)] == ["written"]
        group.call("commit_save")
        assert group.call("load", str(tmp_path / "a")) == [1]


@pytest.mark.parametrize("dies", [False, True])
def test_a_writer_that_was_started_ahead_writes_and_another_one_is_started(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, batches: list[str], dies: bool
) -> None:
    with workers.group(configuration(model(), 1, algorithm=ALGORITHM)) as group:
        group.run(prepare)
        trained(group, batches[:1])
        for number in (1, 2):
            (ahead,) = stop_writers(group)
            if dies:
                os.kill(ahead, signal.SIGKILL)
            group.call("begin_save", str(tmp_path / str(number)))
            (writer,) = stop_writers(group)
            assert (writer == ahead) is not dies
            os.kill(writer, signal.SIGCONT)
            assert [each["state"] for each in wait_until_settled(group)] == ["written"]
            group.call("commit_save")
        held = group.run(state)
        for number in (1, 2):
            assert group.call("load", str(tmp_path / str(number))) == [1]
            assert group.run(state) == held


def test_a_writer_that_dies_fails_its_checkpoint_alone_and_the_next_one_is_written(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, batches: list[str]
) -> None:
    with workers.group(configuration(model(), 2, algorithm=ALGORITHM)) as group:
        trained(group, batches[:1])
        group.call("begin_save", str(tmp_path / "dead"))
        first, second = stop_writers(group)
        os.kill(second, signal.SIGKILL)
        os.kill(first, signal.SIGCONT)
        states = [each["state"] for each in wait_until_settled(group)]
        assert sorted(states) == ["failed", "written"]
        with pytest.raises(
            RankFailedError, match=r"StorageError.*was not written.*nothing committed is lost"
        ):
            group.call("commit_save")
        assert not (tmp_path / "dead" / "complete.json").exists()
        trained(group, batches[1:2], 2)
        group.call("begin_save", str(tmp_path / "dead"))  # what was left there is removed
        wait_until_settled(group)
        group.call("commit_save")
        assert group.call("load", str(tmp_path / "dead")) == [2, 2]


def test_a_writer_that_is_stopped_is_ended_in_the_limit_and_the_next_one_is_written(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, batches: list[str]
) -> None:
    settings = configuration(model(), 2, algorithm=ALGORITHM)
    settings["run"]["progress_timeout_s"] = 6
    with workers.group(settings) as group:
        trained(group, batches[:1])
        group.call("begin_save", str(tmp_path / "saved"))
        first, second = stop_writers(group)
        os.kill(first, signal.SIGCONT)
        reasons = [each["reason"] for each in wait_until_settled(group)]
        (reason,) = [each for each in reasons if each]
        assert reason.startswith(
            "the process that writes the checkpoint: nothing moved for 6 s (run.progress_"
        )
        assert not psutil.pid_exists(second)
        with pytest.raises(RankFailedError, match="StorageError.*nothing moved for 6 s"):
            group.call("commit_save")
        assert not (tmp_path / "saved" / "complete.json").exists()
        group.call("begin_save", str(tmp_path / "saved"))
        wait_until_settled(group)
        group.call("commit_save")
        assert group.call("load", str(tmp_path / "saved")) == [1, 1]


def test_a_folder_that_cannot_be_written_is_named(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, batches: list[str]
) -> None:
    with workers.group(configuration(model(), algorithm=ALGORITHM)) as group:
        trained(group, batches[:1])
        group.call("begin_save", str(tmp_path / "gone"))
        (stopped,) = stop_writers(group)
        for path in (tmp_path / "gone").iterdir():
            path.unlink()
        (tmp_path / "gone").rmdir()
        os.kill(stopped, signal.SIGCONT)
        (found,) = wait_until_settled(group)
        assert found["state"] == "failed"
        assert "No such file or directory" in found["reason"]


def test_a_rank_that_ends_takes_its_writer_along(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, batches: list[str]
) -> None:
    with workers.group(configuration(model(), algorithm=ALGORITHM)) as group:
        trained(group, batches[:1])
        group.call("begin_save", str(tmp_path / "saved"))
        (pid,) = stop_writers(group)
    until = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.1)
