"""Who holds memory while trainer and engine share GPUs, on a node that says it has one: the parts are real and on the CPU."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from millrace.connectors.engines.process import EngineServer
from millrace.connectors.prefect.server import ensure_server, login_file, stop_server
from millrace.connectors.ray import actors
from millrace.connectors.trainers.megatron.rank import TrainerRank
from millrace.connectors.trainers.rank import Rank
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import StepRequest
from millrace.tasks.checkpoint import checkpoint
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.runtime.trainer import Ranks, TrainerRanks
from tests.support.ray_nodes import RayNodes, token_of
from tests.support.trainer_ranks import samples, write_batch

pytestmark = pytest.mark.slow  # some minutes of whole runs and processes

if sys.platform != "linux":
    pytest.skip("other systems have one loopback address", allow_module_level=True)

BOTH, GREEDY = ["weights", "kv_cache"], {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
VOCAB = 96  # of the model that engines serve in tests


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    cluster = RayNodes()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MILLRACE_HOME", str(tmp_path_factory.mktemp("home")))
        try:
            cluster.add(cpus=4, gpus=1).wait()
            url, login = ensure_server(), login_file().read_text()
            ours = {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: login}
            with token_of(cluster), temporary_settings(ours):
                yield cluster
        finally:
            cluster.close()
            stop_server()


async def released() -> list[str]:
    engine = await actors.find_alive("engine", 0, EngineServer)
    assert engine is not None
    return sorted((await engine.state())["released"], reverse=True)


async def kill(role: str) -> None:
    """`kill -9` of the engine's server, or of the rank."""
    cls: type[Any] = EngineServer if role == "engine" else TrainerRank
    actor = await actors.find_alive(role, 0, cls)
    assert actor is not None
    state = await actor.state()
    process = psutil.Process(state["pid"] if role == "engine" else state["actor_pid"])
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:  # until its parent looks
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


@pytest.fixture
def asleep_at_build(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the engine had given back each time ranks had been built."""
    found: list[list[str]] = []
    build = TrainerRanks._build

    async def watched(self: TrainerRanks, version: int) -> Ranks:
        ranks = await build(self, version)
        found.append(await released())
        return ranks

    monkeypatch.setattr(TrainerRanks, "_build", watched)
    return found


@pytest_asyncio.fixture
async def drivers(node: RayNodes, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """Drivers of one run, each started as the one before it died."""
    values = {
        "run": {"name": tmp_path.name.replace("_", "-")[:40].strip("-"), "iterations": 3},
        "model": {"path": str(tiny_model)},
        "data": {"sources": [{"path": "none.jsonl"}]},
        "storage": {"root": str(tmp_path / "runs")},
        "rollout": {"prompts": 1, "samples_per_prompt": 8, "sampling": {"max_new_tokens": 16}},
        "trainer": {"device": "cpu", "threads": 1},
        "engines": {"kind": "embedded", "threads": 1},
        "sync": {"kind": "disk"},
        "checkpoint": {"every": 1},
        "placement": {"colocate": True, "ray_address": node.address},
    }
    made: list[Runtime] = []

    async def start() -> Runtime:
        made.append(driver := Runtime(RunConfig.model_validate(values)))
        await driver.open()
        return driver

    yield start
    for driver in made[:-1]:
        await driver.memory.close()
    await made[-1].close(end_actors=True)


async def sleep(driver: Runtime) -> None:
    """What a train step does first."""
    async with driver.memory.for_trainer():
        pass


async def step(driver: Runtime, folder: Path, version: int) -> None:
    rows = samples(version)
    for row in rows:
        row["tokens"] = [token % VOCAB for token in row["tokens"]]
    batch = write_batch(folder / f"batch-{version}", rows)
    async with driver.memory.for_trainer() as trainer:
        await (await trainer.at(version - 1)).together(Rank.train, StepRequest(version, batch))


async def test_an_engine_sleeps_from_its_start_until_it_is_needed(
    drivers: Any, asleep_at_build: list[list[str]], tmp_path: Path
) -> None:
    driver = await drivers()
    engines = await driver.memory.for_engines(VersionRange.only(0))
    assert asleep_at_build == [BOTH]
    assert await released() == []
    before = await engines.generate([10, 20, 30], GREEDY, rid="a", session=None)
    await sleep(driver)
    assert await released() == BOTH
    await step(driver, tmp_path, 1)
    await kill("engine")
    # to a new engine, which leaves room for whatever the trainer does before the next rollout
    phases = await driver.memory.update_engines(1)
    assert list(phases)[0] == "offload"
    assert await released() == ["kv_cache"]
    after = await (await driver.memory.for_engines(VersionRange.only(1))).generate(
        [10, 20, 30], GREEDY, rid="b", session=None
    )
    assert await released() == []
    assert len(after.output_ids) == len(before.output_ids)
    assert after.weight_versions[0][1] == 1


async def test_engines_sleep_while_a_checkpoint_is_saved_and_take_the_weights_again(
    drivers: Any, asleep_at_build: list[list[str]], tmp_path: Path
) -> None:
    driver = await drivers()
    await driver.memory.for_engines(VersionRange.only(0))
    await sleep(driver)
    await step(driver, tmp_path, 1)
    await driver.memory.update_engines(1)
    assert await released() == ["kv_cache"]
    record = await checkpoint.fn(IterationContext(driver, 0))
    assert record["saved"] == "checkpoints/000001"
    assert await released() == BOTH
    answer = await (await driver.memory.for_engines(VersionRange.only(1))).generate(
        [10, 20, 30], GREEDY, rid="d", session=None
    )
    assert answer.weight_versions[0][1] == 1


async def test_engines_that_an_earlier_driver_left_awake_sleep_before_ranks_work(
    drivers: Any, asleep_at_build: list[list[str]], tmp_path: Path
) -> None:
    await (await drivers()).memory.for_engines(VersionRange.only(0))
    assert await released() == []
    second = await drivers()
    await sleep(second)  # what a train step asks first; the rollout was committed
    assert await released() == BOTH
    await second.memory.for_engines(VersionRange.only(0))
    await kill("trainer")
    third = await drivers()
    assert await released() == []
    await step(third, tmp_path, 1)
    assert asleep_at_build == [BOTH, BOTH]


async def test_a_rank_lost_beside_a_serving_engine_comes_back_and_the_engine_with_it(
    drivers: Any, asleep_at_build: list[list[str]]
) -> None:
    driver = await drivers()
    await driver.memory.for_engines(VersionRange.only(0))
    await kill("trainer")
    engines = await driver.memory.for_engines(VersionRange.only(0))
    assert asleep_at_build == [BOTH, BOTH]
    assert await released() == []
    answer = await engines.generate([10, 20, 30], GREEDY, rid="c", session=None)
    assert answer.weight_versions[0][1] == 0


async def test_gpus_are_handed_to_the_trainer_before_it_is_asked_where_engines_hold_them(
    drivers: Any, asleep_at_build: list[list[str]], tmp_path: Path
) -> None:
    driver = await drivers()
    assert not await driver.memory.hand_to_trainer()  # no part of the run is there yet
    await driver.memory.for_engines(VersionRange.only(0))
    assert await released() == []
    assert await driver.memory.hand_to_trainer()
    assert await released() == BOTH
    assert not await driver.memory.hand_to_trainer()  # the trainer has them
    await step(driver, tmp_path, 1)
    await driver.memory.update_engines(1)
    assert not await driver.memory.hand_to_trainer()  # between the two: a checkpoint may follow
    assert await released() == ["kv_cache"]
    await driver.memory.for_engines(VersionRange.only(1))
    await kill("trainer")
    assert await driver.memory.hand_to_trainer()
    assert await released() == BOTH
    assert len(asleep_at_build) == 1  # a lost rank is left to the step, which knows from where to build it
    await driver.memory.for_engines(VersionRange.only(0))
    await kill("engine")
    assert await driver.memory.hand_to_trainer()
    answer = await (await driver.memory.for_engines(VersionRange.only(0))).generate(
        [10, 20, 30], GREEDY, rid="h", session=None
    )
    assert answer.weight_versions[0][1] == 0
