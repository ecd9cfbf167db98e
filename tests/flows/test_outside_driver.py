"""A run whose driver stands outside the Ray cluster: killed and started again, and cut off from the cluster."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster_run import ClusterRun, ended
from tests.support.flow_runs import Workplace, final_weights, generated, output_of, trained
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


def assert_is(outside: ClusterRun, whole: Path) -> None:
    """It trained what an undisturbed run on this host did, to the same weights, and left nothing in the cluster."""
    run = outside.root / "a"
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    assert max(generated(run).values()) == 1
    assert outside.actors() == [set()]
    assert "nothing is wrong" in outside.place.call("verify", "a", "--root", str(outside.root))


@pytest.fixture
def outside(workplace: Workplace, head: RayNodes, tmp_path: Path) -> ClusterRun:
    return ClusterRun(workplace, head, tmp_path, head.client_address)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["local", "ray"])
def test_killed_and_started_again_it_comes_to_the_same_weights(
    outside: ClusterRun, whole: Path, runner: str
) -> None:
    process = outside.start(f"placement.task_runner={runner}", hold="1/train_step/before")
    outside.wait(process, outside.held.exists)
    before = outside.actors()[0]
    assert len(before) == {"local": 2, "ray": 3}[runner]  # rank and engine, and the board of shards
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    outside.held.unlink()
    process = outside.start(f"placement.task_runner={runner}", hold="2/train_step/before")
    outside.wait(process, outside.held.exists)
    assert outside.actors()[0] == before
    outside.held.unlink()
    assert "3 iterations complete" in ended(process, 0)
    assert_is(outside, whole)


def client_server(head: RayNodes) -> None:
    assert head.nodes[0].kill_client_servers() == 1


def cluster(head: RayNodes) -> None:
    head.kill()
    head.add(cpus=2).wait()


@pytest.mark.slow
@pytest.mark.parametrize("lose", [client_server, cluster])
def test_where_the_cluster_or_its_client_server_dies_the_run_or_the_same_command_goes_on(
    outside: ClusterRun, head: RayNodes, whole: Path, lose: Callable[[RayNodes], None]
) -> None:
    process = outside.start("placement.task_runner=ray", hold="1/train_step/before")
    outside.wait(process, outside.held.exists)
    lose(head)
    outside.held.unlink()
    out = output_of(process)
    print(process.returncode, out)
    if process.returncode:
        assert process.returncode == 2, out  # one of the run's own errors, with its remedy
        assert "Traceback" not in out
        out = ended(outside.start("placement.task_runner=ray"), 0)
    assert "3 iterations complete" in out
    assert_is(outside, whole)
