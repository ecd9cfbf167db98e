"""What a client promises of weights: versions, updates amid requests, refusals; and a fleet that brings the engine to a version."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from millrace.core.config.pipeline import OnUpdate
from millrace.core.contracts.weight_bucket import TensorEntry, WeightBucket
from millrace.core.errors import EngineError
from tests.support.contract import PROMPT, SHORT, Contract
from tests.support.engine_process import CLOSE, EXACT

ENTRY = TensorEntry("model.norm.weight", (2,), "float32", 0, 8)


async def test_weights_from_a_folder_are_served_under_their_version(on: Contract, other_model: Path) -> None:
    before = await on.ask()
    await on.idle()
    await on.client.weights.update_from_disk(str(other_model), 17)
    after = await on.ask()
    assert await on.client.weight_version() == 17
    assert (before.weight_versions, after.weight_versions) == ([(0, on.engine.version)], [(0, 17)])
    assert on.is_of(on.engine.model, before)
    assert on.is_of(other_model, after)
    assert not on.is_of(other_model, before)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_an_update_in_a_pause_shows_in_the_versions_of_a_request(
    on: Contract, other_model: Path, mode: Literal["retract", "in_place"]
) -> None:
    try:
        await on.client.check_keeps_requests()
    except EngineError:
        pytest.skip("SGLang 0.5.17 reports no spans, and ends when it is to flush its cache in a pause")
    (running,) = await on.begun(f"across-{mode}", max_new_tokens=200)
    await on.client.pause(mode)
    on.client.refits_amid_requests += 1
    on.client.weights.flushes = mode == "retract"
    await on.client.weights.update_from_disk(str(other_model), 18)
    await on.client.resume()
    answer = await running
    (first, old), (second, new) = answer.weight_versions
    assert (first, old, new) == (0, on.engine.version, 18)
    assert on.is_of(on.engine.model, answer, slice(0, second))
    if mode == "retract":  # in place, old keys and values stay
        assert on.is_of(other_model, answer, slice(second, 200))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("missing", marks=pytest.mark.embedded_only("SGLang looks for it at Hugging Face")),
        "empty",
    ],
)
async def test_a_folder_that_cannot_be_served_is_refused_and_the_old_weights_stay(
    on: Contract, tmp_path: Path, kind: str
) -> None:
    before = await on.ask()
    await on.idle()
    folder = tmp_path / "broken"
    if kind != "missing":
        folder.mkdir()
        shutil.copy(on.engine.model / "config.json", folder)
    with pytest.raises(EngineError, match=str(folder)):
        await on.client.weights.update_from_disk(str(folder), 20)
    after = await on.ask()
    assert after.output_ids.tolist() == before.output_ids.tolist() or not EXACT
    assert after.weight_versions == [(0, on.engine.version)]
    assert on.is_of(on.engine.model, after)


async def test_prompts_are_scored_at_temperature_one(on: Contract) -> None:
    prompts = [PROMPT, [60, 61, 62]]
    found = await on.client.weights.logprobs(prompts)
    for ids, values in zip(prompts, found, strict=True):
        expected = on.engine.reference(on.engine.model, ids[:1], ids[1:])
        assert values == pytest.approx(expected, abs=CLOSE)


async def test_checksums_tell_weights_apart(on: Contract, other_model: Path) -> None:
    try:
        first = await on.client.weights.checksum()
    except EngineError as error:
        if on.engine.given and "not compiled with CUDA" in str(error):
            pytest.skip("SGLang sums weights only on a GPU")
        raise
    await on.idle()
    await on.client.weights.update_from_disk(str(other_model), 25)
    assert await on.client.weights.checksum() != first
    await on.client.weights.update_from_disk(str(on.engine.model), 28)
    assert await on.client.weights.checksum() == first


async def test_a_bucket_in_shared_memory_is_refused_if_the_engine_lacks_ipc(on: Contract) -> None:
    if "ipc" in on.kind.transports:
        pytest.skip("tests/gpu/test_shared_memory.py sends it")
    bucket = WeightBucket([ENTRY], 8, last=True, handle=pickle.dumps(()))
    with pytest.raises(EngineError, match="engine-0"):
        await on.client.weights.update_from_memory([bucket], 23)
    assert await on.client.weight_version() == on.engine.version


async def test_a_group_is_refused_if_the_engine_lacks_broadcast(on: Contract) -> None:
    if "broadcast" in on.kind.transports:
        pytest.skip("tests/connectors/sglang/test_broadcast.py and tests/gpu/test_two_gpus.py join one")
    with pytest.raises(EngineError, match=r"engine-0: .*broadcast"):
        await on.client.weights.join_group("127.0.0.1", 1, 1, 2, "g", "gloo")
    with pytest.raises(EngineError, match=r"engine-0: .*broadcast"):
        await on.client.weights.update_from_broadcast([ENTRY], "g", 23)


UPDATES: list[OnUpdate] = ["finish", "resend", "retract", "keep"]


@pytest.mark.parametrize("on_update", UPDATES)
async def test_a_fleet_brings_the_engine_to_a_version_and_its_dispatcher_generates(
    on: Contract, other_model: Path, on_update: OnUpdate
) -> None:
    if on_update in ("retract", "keep"):
        try:
            await on.client.check_keeps_requests()
        except EngineError:
            pytest.skip("SGLang 0.5.17 cannot keep requests while weights change")
    fleet, model, updating = on.fleet(), on.engine.model, asyncio.Lock()

    async def recover(_: int) -> None:
        async with updating:
            await fleet.ensure(str(model))

    await fleet.ensure(str(model))
    await fleet.update_weights(str(model), 31)
    assert fleet.unconfirmed(31) == []
    dispatcher = fleet.dispatcher(31, recover, oldest=31, newest=32)
    before = await dispatcher.generate(PROMPT, SHORT, rid=f"before-{on_update}", session=None)
    long = {**SHORT, "max_new_tokens": 150}
    running = asyncio.create_task(dispatcher.generate(PROMPT, long, rid=f"amid-{on_update}", session="s"))
    async with asyncio.timeout(60), updating:
        while not any(engine.in_flight for engine in dispatcher.serving):  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)
        await fleet.update_weights(str(other_model), 32, on_update=on_update)
    amid = await running
    after = await dispatcher.generate(PROMPT, SHORT, rid=f"after-{on_update}", session=None)
    await fleet.close()
    assert fleet.restarts == 0
    assert (before.weight_versions, after.weight_versions) == ([(0, 31)], [(0, 32)])
    assert on.is_of(model, before)
    assert on.is_of(other_model, after)
    assert len(amid.output_ids) == 150
    assert {version for _, version in amid.weight_versions} <= {31, 32}
    assert np.isfinite(amid.logprobs).all()
