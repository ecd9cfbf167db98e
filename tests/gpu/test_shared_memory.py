"""Memory of a shared GPU goes to and fro: the bytes really come back, and weights survive it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from benchmarks.gpu.shapes import SGLANG, configuration, model_folder, weight_bytes
from millrace.connectors.prefect.server import ensure_server, stop_server
from millrace.connectors.trainers.rank import Rank
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import StepRequest
from millrace.tasks.runtime.runtime import Runtime
from tests.support.gpu_workplace import server_of
from tests.support.trainer_ranks import samples, write_batch

SHARE = 0.3
STATE_BYTES = 16  # of a parameter: fp32 gradient, fp32 weight, two moments


def used() -> int:
    """Bytes of the GPU that are taken, by whomever."""
    free, whole = torch.cuda.mem_get_info(0)
    return int(whole - free)


def total() -> int:
    return int(torch.cuda.mem_get_info(0)[1])


@pytest_asyncio.fixture
async def runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Runtime]:
    """A colocated run's live parts; a test's parameter: the engine's share of the GPU, and more of `placement`."""
    share, placement = getattr(request, "param", (SHARE, {}))
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"):
        monkeypatch.setenv(name, "")  # so that it is as it was in the end: the next test's server is another
        monkeypatch.delenv(name)
    ensure_server()
    model = model_folder("0.6b", tmp_path / "0.6b")
    sglang = {**SGLANG, "mem_fraction_static": share, "cuda_graph_max_bs_decode": 16}
    values = configuration(
        model,
        tmp_path,
        run={"name": "memory", "iterations": 3},
        engines={"kind": "sglang", "sglang": {**sglang, "load_format": "dummy"}},
        rollout={"prompts": 1, "samples_per_prompt": 8, "sampling": {"max_new_tokens": 16}},
        sync={"kind": "ipc"},
    )
    values["placement"].update(placement)
    made = Runtime(RunConfig.model_validate(values))
    await made.open()
    yield made
    await made.close(end_actors=True)
    stop_server()


async def stepped(runtime: Runtime, folder: Path, version: int) -> dict[str, Any]:
    """The figures of a train step to a version, with engines asleep as in a run."""
    batch = write_batch(folder / f"batch-{version}", samples(version, logprob=-math.log(151936)))
    async with runtime.memory.for_trainer() as trainer:
        ranks = await trainer.at(version - 1)
        return dict(await ranks.together(Rank.train, StepRequest(version, batch)))


async def test_the_bytes_come_back_to_whoever_works(runtime: Runtime, tmp_path: Path) -> None:
    prompt: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    engines = await runtime.memory.for_engines(VersionRange.only(0))
    before = await engines.generate([10, 20, 30], prompt, rid="before", session=None)
    serving = used()

    batch = write_batch(tmp_path / "batch", samples(1, logprob=-math.log(151936)))
    async with runtime.memory.for_trainer() as trainer:
        asleep = used()
        assert serving - asleep > 0.8 * SHARE * total()  # weights and KV cache
        ranks = await trainer.at(0)
        await ranks.together(Rank.train, StepRequest(1, batch))
        training = used()
        freed = (await ranks.each(Rank.offload))[0]
    offloaded = used()
    parameters = weight_bytes(tmp_path / "0.6b") // 2
    assert freed > 0.95 * STATE_BYTES * parameters
    assert training - offloaded == pytest.approx(freed, rel=0.05)

    engines = await runtime.memory.for_engines(VersionRange.only(1))
    assert used() == pytest.approx(serving, rel=0.1)
    after = await engines.generate([10, 20, 30], prompt, rid="after", session=None)
    assert after.weight_versions[0][1] == 1
    assert len(after.output_ids) == len(before.output_ids) == 8

    answer = await stepped(runtime, tmp_path, 2)
    assert math.isfinite(answer["grad_norm"])  # the optimizer's state came back
    trained, weights, bucket = used(), weight_bytes(tmp_path / "0.6b"), 2**30
    await runtime.memory.update_engines(2)
    assert trained - used() > 0.9 * freed - weights - bucket  # the trainer has left


def nearly_all() -> float:
    """A share of the GPU beside which a trainer of the 0.6B shape has no room, and an offloaded one has."""
    trainer = (STATE_BYTES + 2) * 600_000_000
    return 1 - 0.8 * trainer / total()


@pytest.mark.parametrize("runtime", [(nearly_all(), {})], indirect=True)
async def test_an_engine_that_takes_nearly_all_leaves_room_for_a_trainer_to_be_built(
    runtime: Runtime, tmp_path: Path
) -> None:
    prompt: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    await runtime.memory.for_engines(VersionRange.only(0))  # builds the trainer
    serving = used()
    assert math.isfinite((await stepped(runtime, tmp_path, 1))["grad_norm"])
    server = server_of(tmp_path / "0.6b")
    assert server is not None
    server.kill()
    engines = await runtime.memory.for_engines(
        VersionRange.only(1)
    )  # a new engine, which finds as much room as the first
    assert used() == pytest.approx(serving, rel=0.1)
    after = await engines.generate([10, 20, 30], prompt, rid="after", session=None)
    assert after.weight_versions[0][1] == 1


@pytest.mark.parametrize(
    "runtime", [(SHARE, {"offload_engines": False, "offload_trainer": False})], indirect=True
)
async def test_both_keep_their_memory_where_they_are_told_to(runtime: Runtime, tmp_path: Path) -> None:
    await runtime.memory.for_engines(VersionRange.only(0))
    serving = used()
    async with runtime.memory.for_trainer():
        assert used() == pytest.approx(serving, rel=0.02)
    synced = []
    for version in (1, 2, 3):
        assert math.isfinite((await stepped(runtime, tmp_path, version))["grad_norm"])
        training = used()
        engines = await runtime.memory.for_engines(VersionRange.only(version))
        synced.append(used())
        assert synced[-1] == pytest.approx(training, rel=0.02)
    assert synced[-1] == pytest.approx(synced[0], rel=0.005)  # no sync adds to it
    after = await engines.generate(
        [10, 20, 30], {"max_new_tokens": 8, "ignore_eos": True}, rid="a", session=None
    )
    assert after.weight_versions[0][1] == 3
