"""An engine over two Ray nodes: a process on each, which live and end together. SGLang's stand-in takes its command line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.engines.process import EngineNode, EngineServer
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.engines.weight_update import load_by_broadcast
from millrace.connectors.ray import actors
from millrace.core.config import RunConfig
from millrace.core.errors import EngineError
from millrace.tasks.runtime.cluster import Cluster
from millrace.tasks.runtime.engines import Engines
from tests.support.fleets import checksums
from tests.support.flow_runs import Patience
from tests.support.ray_nodes import RayNodes, ray_nodes, token_of
from tests.support.sent_weights import Sending
from tests.support.sglang_stand_in import FAILS, install

if sys.platform != "linux":
    pytest.skip("other systems have one loopback address", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PARAMS = {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
SERVER = "sglang.launch_server"


@pytest.fixture(scope="module")
def fails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stand-in") / "fails"


@pytest.fixture(scope="module")
def nodes(fails: Path) -> Iterator[RayNodes]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=":")
        for name, value in {**install(fails.parent / "packages"), FAILS: str(fails)}.items():
            environment.setenv(name, value)
        with ray_nodes(cpus=4, gpus=1) as found, token_of(found):
            yield found


class Driver:
    """What a driver has of its engines."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.cluster = Cluster(config)
        self.engines = Engines(config, self.cluster, _no_room_needed)

    async def ready(self, version: int = 1) -> Fleet:
        fleet = await self.engines.running()
        missing = fleet.unconfirmed(version)
        if missing:
            await fleet.update_weights(self.config.model.path, version, missing)
        return fleet

    async def generated(self) -> list[int]:
        async def recover(version: int) -> None:
            await self.ready(version)

        dispatcher = (await self.ready()).dispatcher(1, recover)
        found = await dispatcher.generate([10, 20], PARAMS, rid="r", session=None)
        return found.output_ids.tolist()


async def _no_room_needed() -> None:
    pass


@pytest_asyncio.fixture
async def drivers(
    nodes: RayNodes, fails: Path, tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[list[Driver]]:
    """Drivers of one run, one after the other."""
    values: dict[str, Any] = {
        "run": {"name": request.node.name[:40].replace("_", "-").strip("-"), "iterations": 1},
        "storage": {"root": str(tmp_path)},
        "model": {"path": str(tiny_model)},
        "data": {"sources": [{"path": "d.jsonl"}]},
        "trainer": {"device": "cpu"},
        "engines": {"kind": "sglang", "gpus": 2, "nodes": 2, "host": "0.0.0.0", "start_timeout_s": 120},
        "sync": {"kind": "disk", "directory": str(tmp_path / "weights")},
        "placement": {"ray_address": nodes.address, "tensor_over_hosts": True},
    }
    config = RunConfig.model_validate(values)
    made = [Driver(config), Driver(config)]
    yield made
    fails.unlink(missing_ok=True)
    for driver in made:
        await driver.engines.close()
    await made[0].cluster.join()
    await made[0].cluster.end_actors()
    made[0].cluster.leave()


def processes(driver: Driver) -> dict[int, psutil.Process]:
    """The engine's processes by the rank of their nodes."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if SERVER in line and option(line, "--model-path") == driver.config.model.path:
            found[int(option(line, "--node-rank"))] = process
    return found


def option(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


async def until(holds: Any) -> None:
    patience = Patience(60)
    while not holds():
        assert patience.left
        await asyncio.sleep(0.1)


async def test_an_engine_has_a_process_on_each_node_and_answers_at_the_first(
    drivers: list[Driver], nodes: RayNodes
) -> None:
    assert len(await drivers[0].generated()) == 4
    found = processes(drivers[0])
    lines = {rank: process.cmdline() for rank, process in found.items()}
    assert sorted(lines) == [0, 1]
    meeting = option(lines[0], "--dist-init-addr")
    for rank, line in lines.items():
        assert (option(line, "--nnodes"), option(line, "--tp-size")) == ("2", "2")
        assert option(line, "--dist-init-addr") == meeting
        assert found[rank].environ()["CUDA_VISIBLE_DEVICES"] == "0"  # of its node
    assert [option(lines[rank], "--host") for rank in (0, 1)] == ["0.0.0.0", "127.0.0.1"]
    holders = [
        {at for at, node in enumerate(nodes.nodes) if found[r].ppid() in node.actors()} for r in (0, 1)
    ]
    assert sorted(map(len, holders)) == [1, 1]
    assert holders[0] != holders[1]
    first = nodes.nodes[holders[0].pop()]
    assert meeting.partition(":")[0] == first.address
    assert found[0].environ()["SGLANG_HOST_IP"] == first.address


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("holder", [False, True], ids=["process", "actor"])
async def test_the_end_of_one_process_is_the_end_of_the_engine_which_is_started_again(
    rank: int, holder: bool, drivers: list[Driver]
) -> None:
    driver = drivers[0]
    before = await driver.generated()
    found = processes(driver)
    os.kill(found[rank].ppid() if holder else found[rank].pid, signal.SIGKILL)
    await until(lambda: not processes(driver))  # the other one by itself, without a request
    assert await driver.generated() == before
    again = processes(driver)
    assert not {process.pid for process in found.values()} & {process.pid for process in again.values()}
    assert sorted(again) == [0, 1]
    fleet = await driver.engines.running()
    assert fleet.restarts == 1
    assert fleet.unconfirmed(1) == []


async def test_requests_that_run_when_the_second_node_loses_its_process_are_sent_again(
    drivers: list[Driver],
) -> None:
    driver, recovering = drivers[0], asyncio.Lock()

    async def recover(version: int) -> None:
        async with recovering:
            await driver.ready(version)

    dispatcher = (await driver.ready()).dispatcher(1, recover)
    long = {**PARAMS, "max_new_tokens": 1000}
    running = [
        asyncio.create_task(dispatcher.generate([10, 20], long, rid=f"r{n}", session=None)) for n in range(3)
    ]
    await asyncio.sleep(0.3)
    processes(driver)[1].kill()
    found = await asyncio.gather(*running)
    assert len({tuple(each.output_ids) for each in found}) == 1
    assert dispatcher.retries


@pytest.mark.parametrize("kind", ["disk", "broadcast"])
async def test_weights_reach_the_processes_on_all_nodes(
    kind: str, drivers: list[Driver], other_model: Path
) -> None:
    fleet = await drivers[0].ready()
    sending = Sending(other_model)
    try:
        load = load_by_broadcast(sending.stream, sending, 2, {})
        for version in (2, 3):  # the second time in the same group
            await fleet.update_weights(load if kind == "broadcast" else str(other_model), version)
            assert fleet.unconfirmed(version) == []
        assert len(sending.groups) == (kind == "broadcast")
    finally:
        sending.close_broadcast()
    second = processes(drivers[0])[1].cmdline()
    client = SglangClient(f"http://127.0.0.1:{option(second, '--port')}", "second")
    held = await client.weights.checksum()
    await client.close()
    (first,) = await checksums(fleet)
    assert held == first
    await fleet.update_weights(drivers[0].config.model.path, 4)
    assert await checksums(fleet) != [first]


async def test_a_later_driver_finds_the_engine_as_it_was(drivers: list[Driver]) -> None:
    before = await drivers[0].generated()
    pids = {rank: process.pid for rank, process in processes(drivers[0]).items()}
    await drivers[0].engines.close()
    assert await drivers[1].engines.exist()
    assert await drivers[1].generated() == before
    assert {rank: process.pid for rank, process in processes(drivers[0]).items()} == pids
    assert (await drivers[1].engines.running()).restarts == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("holder", [False, True], ids=["process", "actor"])
async def test_a_later_driver_ends_what_is_left_of_an_engine(
    rank: int, holder: bool, drivers: list[Driver]
) -> None:
    """Before the trainer takes the GPUs, and without a start of the engine."""
    await drivers[0].ready()
    await drivers[0].engines.close()
    found = processes(drivers[0])
    os.kill(found[rank].ppid() if holder else found[rank].pid, signal.SIGKILL)
    await until(lambda: rank not in processes(drivers[0]))
    await drivers[1].engines.sleep()
    assert not processes(drivers[0])
    assert len(await drivers[1].generated()) == 4


async def test_no_process_outlives_the_runs_actors(drivers: list[Driver]) -> None:
    await drivers[0].ready()
    assert len(processes(drivers[0])) == 2
    assert await actors.end() == 2
    await until(lambda: not processes(drivers[0]))


async def test_a_start_whose_second_process_ends_says_so_and_leaves_none(
    drivers: list[Driver], fails: Path
) -> None:
    fails.write_text("1 a layer has no room")
    with pytest.raises(
        EngineError,
        match=r"(?s)engine 0 \(sglang\), node 1 ended with 1; the end of .*engine-0-node-1.log"
        ".*a layer has no room",
    ):
        await drivers[0].ready()
    assert not processes(drivers[0])
    assert len(await drivers[0].generated()) == 4


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_start_that_lost_a_port_to_another_process_is_made_again(
    rank: int, drivers: list[Driver], fails: Path
) -> None:
    fails.write_text(f"{rank} [Errno 98] Address already in use")
    fleet = await drivers[0].ready()
    assert fleet.restarts == 0
    first = actors.find("engine", 0, EngineServer)
    second = actors.find("engine_node", 0, EngineNode)
    assert first
    assert second
    assert (await first.state())["starts"] == (await second.state())["starts"] == 2
