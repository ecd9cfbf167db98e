"""A run whose driver stands outside the Ray cluster: killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.flow_runs import PATIENCE_S, Workplace, final_weights, generated, trained, wait_until
from tests.support.ray_nodes import RayNodes

if sys.platform != "linux":
    pytest.skip("other systems have one loopback address", allow_module_level=True)


@pytest.fixture(scope="module")
def head() -> Iterator[RayNodes]:
    found = RayNodes()
    try:
        found.add(cpus=2).wait()
        yield found
    finally:
        found.close()


class Outside:
    """The run `a` on the cluster, whose driver joins by Ray's client server."""

    def __init__(self, place: Workplace, head: RayNodes, folder: Path) -> None:
        self.place = place
        self.head = head
        self.root = folder / "runs"
        self.run = self.root / "a"
        self.held = folder / "held"
        (folder / "weights").mkdir()
        self.overrides = [
            f"storage.root={self.root}",
            f"placement.ray_address={head.client_address}",
            f"sync.directory={folder / 'weights'}",
            "engines.kind=embedded",
            "engines.host=0.0.0.0",
        ]

    def start(self, *overrides: str, hold: str = "") -> subprocess.Popen[str]:
        stop = {"MILLRACE_KILL_POINT": hold, "MILLRACE_KILL_POINT_FILE": str(self.held)} if hold else {}
        environment = {**self.head.environment, **stop}
        return self.place.start("train", "run.yaml", *self.overrides, *overrides, **environment)

    def wait(self, process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
        """Until something holds; fails with what the run printed if it ends before."""
        wait_until(lambda: holds() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]

    def assert_is(self, whole: Path) -> None:
        """It trained what an undisturbed run on this host did, to the same weights, and left nothing in the cluster."""
        assert trained(self.run) == trained(whole)
        assert final_weights(self.run) == final_weights(whole)
        assert max(generated(self.run).values()) == 1
        assert self.head.nodes[0].actors() == set()
        assert "nothing is wrong" in self.place.call("verify", "a", "--root", str(self.root))


@pytest.fixture
def outside(workplace: Workplace, head: RayNodes, tmp_path: Path) -> Outside:
    return Outside(workplace, head, tmp_path)


def ended(process: subprocess.Popen[str], code: int) -> str:
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, out
    return out


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["local", "ray"])
def test_killed_and_started_again_it_comes_to_the_same_weights(
    outside: Outside, whole: Path, runner: str
) -> None:
    process = outside.start(f"placement.task_runner={runner}", hold="1/train_step/before")
    outside.wait(process, outside.held.exists)
    before = outside.head.nodes[0].actors()
    assert len(before) == {"local": 2, "ray": 3}[runner]  # rank and engine, and the board of shards
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    outside.held.unlink()
    process = outside.start(f"placement.task_runner={runner}", hold="2/train_step/before")
    outside.wait(process, outside.held.exists)
    assert outside.head.nodes[0].actors() == before
    outside.held.unlink()
    assert "3 iterations complete" in ended(process, 0)
    outside.assert_is(whole)
