"""Runs whose engine spans two Ray nodes: a process of it killed, the driver killed, a node killed."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millrace.connectors.host.process_identity import wait_ended
from tests.support.cluster_run import ClusterRun, ended
from tests.support.flow_runs import Workplace, final_weights, generated, trained, wait_until
from tests.support.ray_nodes import RayNodes, ray_nodes
from tests.support.sglang_stand_in import install

if sys.platform != "linux":
    pytest.skip("other systems have one loopback address", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SERVER = "sglang.launch_server"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in install(tmp_path_factory.mktemp("stand-in") / "packages").items():
            environment.setenv(name, value)
        with ray_nodes(cpus=3, gpus=1) as found:
            yield found


@pytest.fixture
def spanning(workplace: Workplace, nodes: RayNodes, tmp_path: Path) -> ClusterRun:
    return ClusterRun(
        workplace,
        nodes,
        tmp_path,
        nodes.address,
        "engines={kind: sglang, gpus: 2, nodes: 2, host: 0.0.0.0}",
        "placement.tensor_over_hosts=true",
        "trainer.device=cpu",
    )


def servers(run: ClusterRun) -> dict[int, psutil.Process]:
    """The engine's processes by the rank of their nodes."""
    found = {}
    for node in run.nodes.nodes:
        for holder in node.actors():
            for process in psutil.Process(holder).children():
                line = process.cmdline()
                if SERVER in line:
                    found[int(line[line.index("--node-rank") + 1])] = process
    return found


def test_the_run_is_as_with_an_engine_on_one_node_also_when_the_second_loses_its_process(
    spanning: ClusterRun, whole: Path
) -> None:
    process = spanning.start("sync.kind=disk", hold="1/rollout/in")
    spanning.wait(process, spanning.held.exists)
    found = servers(spanning)
    assert sorted(found) == [0, 1]
    found[1].kill()
    assert not wait_ended([found[0]], 60)  # the first one is ended with it
    spanning.held.unlink()
    out = ended(process, 0)
    assert re.search(r"its process on node 2 of 2 has ended; ending the others", out), out
    assert re.search(r"engine-0 died: .*; restart 1 of 3", out), out
    run = spanning.root / "a"
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    assert servers(spanning) == {}


def test_a_driver_that_was_killed_finds_its_engine_as_it_was(spanning: ClusterRun, whole: Path) -> None:
    process = spanning.start("sync.kind=disk", hold="1/train_step/before")
    spanning.wait(process, spanning.held.exists)
    before = servers(spanning)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    spanning.held.unlink()
    process = spanning.start("sync.kind=disk", hold="2/train_step/before")
    spanning.wait(process, spanning.held.exists)
    assert servers(spanning) == before
    spanning.held.unlink()
    assert "3 iterations complete" in ended(process, 0)
    run = spanning.root / "a"
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    assert max(generated(run).values()) == 1
    wait_until(lambda: not servers(spanning))


def test_a_node_that_dies_takes_its_part_and_the_engine_goes_on_with_another(
    spanning: ClusterRun, whole: Path
) -> None:
    """Last in this file: it leaves other nodes than it found."""
    process = spanning.start("sync.kind=disk", hold="1/train_step/before")
    spanning.wait(process, spanning.held.exists)
    lost = spanning.nodes.nodes[-1]
    assert lost.actors()
    spanning.nodes.add(cpus=3, gpus=1).wait()
    lost.kill()
    spanning.held.unlink()
    assert "3 iterations complete" in ended(process, 0)
    run = spanning.root / "a"
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    wait_until(lambda: not servers(spanning))
