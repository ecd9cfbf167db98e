"""A run on a Ray cluster of two nodes: actors and shards on both, the driver killed, a node killed with and without a spare one."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.cluster_run import ClusterRun, ended
from tests.support.flow_runs import Workplace, final_weights, generated, trained, wait_until
from tests.support.ray_nodes import RayNodes, ray_nodes

if sys.platform != "linux":
    pytest.skip("other systems have one loopback address", allow_module_level=True)

SAMPLES = 3 * 8 * 4
# a process of a node that names a port connects to it nowhere, as behind a firewall
REFUSES = """
import os
import socket

connect = socket.socket.connect


def refuse(self, address):
    if isinstance(address, tuple) and str(address[1]) == os.environ.get("TEST_REFUSED_PORT"):
        raise ConnectionRefusedError(111, "Connection refused")
    return connect(self, address)


socket.socket.connect = refuse
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(cpus=2) as found:
        yield found


@pytest.fixture
def spread(workplace: Workplace, nodes: RayNodes, tmp_path: Path) -> ClusterRun:
    return ClusterRun(
        workplace,
        nodes,
        tmp_path,
        nodes.address,
        "trainer.world_size=2",
        "engines.count=2",
        "placement.wait_s=15",
    )


@pytest.mark.slow
def test_parts_run_on_both_nodes_and_outlive_their_driver(spread: ClusterRun) -> None:
    process = spread.start(hold="1/train_step/before")
    spread.wait(process, spread.held.exists)
    before = spread.actors()
    assert [len(found) for found in before] == [3, 2]  # ranks, engines, and the board on the driver's node
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    spread.held.unlink()
    process = spread.start(hold="2/train_step/before")
    spread.wait(process, spread.held.exists)
    assert spread.actors() == before
    spread.held.unlink()
    assert "3 iterations complete" in ended(process, 0)
    assert_whole(spread)
    assert spread.actors() == [set(), set()]


@pytest.mark.slow
def test_engines_on_loopback_of_another_node_are_refused(spread: ClusterRun) -> None:
    out = ended(spread.start("engines.host=127.0.0.1", "engines.count=3", "trainer.world_size=1"), 2)
    assert "engines.host = 127.0.0.1" in out
    assert "set it to 0.0.0.0" in out


@pytest.mark.slow
def test_a_run_goes_on_by_itself_where_a_dead_nodes_place_is_taken_and_says_so_where_not(
    spread: ClusterRun,
) -> None:
    often = "engines.restarts=8"  # each node that dies may have both engines
    process = spread.start(often, hold="1/train_step/before")
    spread.wait(process, spread.held.exists)
    third = spread.nodes.add(cpus=2).wait()
    spread.nodes.nodes[1].kill()
    spread.held.unlink()
    spread.wait(process, lambda: len(third.actors()) == 2)
    third.kill()  # and nobody takes its place
    out = ended(process, 2)
    assert "placement: the run needs 4 CPUs (the cluster has 2" in out
    assert "nodes alive: 1" in out
    spread.nodes.add(cpus=2)
    assert "3 iterations complete" in ended(spread.start(often), 0)
    assert_whole(spread)


@pytest.mark.slow
def test_a_shard_whose_node_dies_is_made_on_another_one_from_what_it_had_written(
    spread: ClusterRun, whole: Path
) -> None:
    lost = spread.nodes.nodes[-1]
    process = spread.start("trainer.world_size=1", "engines.count=3", hold="1/rollout/in")
    parts = spread.root / "a" / "iterations" / "000001" / "rollouts"
    spread.wait(process, lambda: len(list(parts.glob("part-*.parquet"))) == 2)  # one of each shard
    assert lost.shards() == {"rollout_shard", "reward_shard"}
    spread.nodes.add(cpus=2).wait()
    lost.kill()

    def let_go() -> bool:
        spread.held.unlink(missing_ok=True)
        return process.poll() is not None

    wait_until(let_go)
    out = ended(process, 0)
    assert "of rollout: its process died" in out
    assert "3 iterations complete" in out
    run = spread.root / "a"
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    assert max(generated(run).values()) == 1
    assert_whole(spread)


@pytest.mark.slow
def test_where_a_node_cannot_reach_the_prefect_server_the_driver_generates_or_says_what_to_do(
    spread: ClusterRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    path = os.pathsep.join([str(tmp_path), spread.place.environment.get("PYTHONPATH", "")])
    monkeypatch.setitem(spread.place.environment, "PYTHONPATH", path)
    third = spread.nodes.add(cpus=2, TEST_REFUSED_PORT=str(urlsplit(spread.place.api).port)).wait()
    alive = sum(node.alive for node in spread.nodes.nodes)
    once = ("run.iterations=1", "trainer.world_size=1", f"engines.count={2 * alive - 1}")
    out = ended(spread.start(*once, "placement.task_runner=ray"), 2)
    assert "placement.task_runner = ray: Prefect cannot start a shard on node" in out
    assert "Failed to reach API" in out or "Prefect's server did not answer there for 60 s" in out
    assert "set PREFECT_API_URL" in out
    out = ended(spread.start(*once), 0)
    assert "this process does the work of shards, since Prefect cannot start one on node" in out
    assert "1 iterations complete" in out
    third.kill()


def assert_whole(spread: ClusterRun) -> None:
    """Every sample was trained once, and every file is what its manifest says."""
    run = spread.root / "a"
    assert json.loads((run / "run.json").read_text())["completed"]
    pairs = trained(run)
    assert len(pairs) == len({sample for sample, _ in pairs}) == SAMPLES
    assert "nothing is wrong" in spread.place.call("verify", "a", "--root", str(spread.root))
