"""Dispatcher and fleet over real engines: choice, kills in the middle, weight versions, deadlines."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.connectors.sglang.checksums import differing_tensors
from millrace.connectors.sglang.client import Generation
from millrace.connectors.sglang.dispatcher import Dispatcher, request_id
from millrace.connectors.sglang.fleet import Fleet
from millrace.core.errors import EngineError, EngineLostError, EngineStalledError, MissingFileError
from tests.support.engine_process import reference_logprobs
from tests.support.local_handle import LocalHandle

PROMPT = [10, 20, 30]
SHORT = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
LONG = {"max_new_tokens": 1200, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
MakeFleet = Callable[..., Fleet]


def recovery(fleet: Fleet, model: Path) -> Callable[[int], Awaitable[None]]:
    """What a run does when a request was lost: rebuild, then bring what is unconfirmed to the version."""
    lock = asyncio.Lock()

    async def recover(version: int) -> None:
        async with lock:
            await fleet.ensure(str(model))
            missing = fleet.unconfirmed(version)
            if missing:
                await fleet.update_weights(str(model), version, missing)

    return recover


async def serving(fleet: Fleet, model: Path, version: int) -> Dispatcher:
    """A dispatcher whose engines have all confirmed a version."""
    recover = recovery(fleet, model)
    await recover(version)
    return fleet.dispatcher(version, recover)


async def generate(
    dispatcher: Dispatcher, count: int, params: dict[str, Any], session: str | None = None
) -> list[Generation]:
    """`count` samples at once."""
    return await asyncio.gather(
        *(dispatcher.generate(PROMPT, params, rid=uuid.uuid4().hex, session=session) for _ in range(count))
    )


async def until_generating(dispatcher: Dispatcher) -> None:
    """Wait until both engines generate for somebody."""
    for _ in range(400):
        engines = dispatcher._engines()
        if all([(await engine.server_info())["load"]["running"] for engine in engines]):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engines do not generate")


async def test_an_engine_serves_only_after_it_confirmed_the_version(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    fleet = make_fleet()
    await fleet.ensure(str(tiny_model))
    assert fleet.unconfirmed(1) == [0, 1]

    async def no_recovery(version: int) -> None:
        assert version == 1

    dispatcher = fleet.dispatcher(1, no_recovery)
    with pytest.raises(EngineError, match="no engine serves"):
        await dispatcher.generate(PROMPT, SHORT, rid="early", session=None)
    seconds = await fleet.update_weights(str(tiny_model), 1)
    assert set(seconds) == {"wake", "pause", "load", "resume", "confirm"}
    assert fleet.unconfirmed(1) == []
    found = await dispatcher.generate(PROMPT, SHORT, rid="late", session=None)
    assert found.weight_versions == [(0, 1)]
    assert found.finish == "length"
    assert found.logprobs == pytest.approx(reference_logprobs(tiny_model, PROMPT, found.output_ids), abs=1e-4)


async def test_another_driver_finds_the_version_that_engines_confirm(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    first = make_fleet()
    await serving(first, tiny_model, 2)
    second = make_fleet()
    await second.ensure(str(tiny_model))
    assert second.unconfirmed(2) == []
    assert second.restarts == 0


async def test_an_engine_that_gave_its_weights_back_holds_no_version_for_anybody(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    first = make_fleet()
    dispatcher = await serving(first, tiny_model, 21)
    before = await dispatcher.generate(PROMPT, SHORT, rid="before", session=None)
    await first.sleep()
    for fleet in (first, make_fleet()):  # the same driver, and one that comes after it died
        await fleet.ensure(str(tiny_model))
        assert fleet.unconfirmed(21) == [0, 1]
    dispatcher = await serving(fleet, tiny_model, 21)
    assert await fleet.wake()
    assert not await fleet.wake()
    after = await dispatcher.generate(PROMPT, SHORT, rid="after", session=None)
    assert after.output_ids == before.output_ids


async def test_an_engine_that_ends_as_it_takes_its_memory_is_replaced_and_the_fields_for_more_room_are_told(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = make_fleet(placement={"colocate": True, "offload_trainer": False})
    await serving(fleet, tiny_model, 24)
    await fleet.sleep()
    handles[0].signal(signal.SIGKILL)
    await fleet.wake()
    assert (
        "lower engines.sglang.mem_fraction_static (now its default) or set placement.offload" in caplog.text
    )
    dispatcher = await serving(fleet, tiny_model, 24)
    assert {one.engine_id for one in await generate(dispatcher, 8, SHORT)} == {"engine-0", "engine-1"}


async def test_engines_that_serve_nothing_can_rest_while_others_go_on(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    fleet = make_fleet()
    dispatcher = await serving(fleet, tiny_model, 22)
    running = asyncio.create_task(dispatcher.generate(PROMPT, LONG, rid="long", session=None))
    await asyncio.sleep(0)
    await fleet.sleep([1])
    assert fleet.unconfirmed(22) == [1]
    made = await generate(
        dispatcher, 4, SHORT
    )  # more than the other engine, which is busy, would get by its load
    assert {one.engine_id for one in [*made, await running]} == {"engine-0"}
    assert dispatcher.retries == 0
    await serving(fleet, tiny_model, 22)
    assert await fleet.wake()
    assert fleet.unconfirmed(22) == []


async def test_room_is_made_before_a_server_starts_and_only_then(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    alive: list[list[bool]] = []

    async def make_room() -> None:
        alive.append([handle.server.state()["alive"] for handle in handles])

    fleet = make_fleet(make_room)
    await serving(fleet, tiny_model, 23)
    alive.clear()
    await fleet.ensure(str(tiny_model))
    assert alive == []
    server = psutil.Process(handles[1].server.state()["pid"])
    server.kill()
    server.wait(timeout=20)
    await fleet.ensure(str(tiny_model))
    assert alive == [[True, False]]


async def test_load_is_spread_and_sessions_stay(make_fleet: MakeFleet, tiny_model: Path) -> None:
    dispatcher = await serving(make_fleet(), tiny_model, 3)
    params = {**SHORT, "max_new_tokens": 60}
    spread = await asyncio.gather(
        *(dispatcher.generate(PROMPT, params, rid=f"free-{n}", session=None) for n in range(16))
    )
    assert Counter(g.engine_id for g in spread) == {"engine-0": 8, "engine-1": 8}
    for session in ("a", "b", "c"):
        together = await asyncio.gather(
            *(dispatcher.generate(PROMPT, params, rid=f"{session}-{n}", session=session) for n in range(6))
        )
        assert len({g.engine_id for g in together}) == 1
    assert dispatcher.retries == 0


async def test_a_killed_engines_requests_are_made_again_and_it_is_rebuilt(
    make_fleet: MakeFleet,
    tiny_model: Path,
    handles: list[LocalHandle],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = make_fleet()
    dispatcher = await serving(fleet, tiny_model, 4)
    undisturbed = await dispatcher.generate(PROMPT, LONG, rid="undisturbed", session=None)
    running = [
        asyncio.create_task(dispatcher.generate(PROMPT, LONG, rid=f"r{n}", session=None)) for n in range(8)
    ]
    await until_generating(dispatcher)
    before = handles[0].server.state()["pid"]
    handles[0].signal(signal.SIGKILL)
    found = await asyncio.gather(*running)
    assert dispatcher.retries == 4
    assert sum("attempt 1 of" in record.message for record in caplog.records) == 1  # not one a request
    assert all(g.output_ids == undisturbed.output_ids for g in found)  # the same seed is the same sample
    assert {g.weight_versions[0] for g in found} == {(0, 4)}
    assert fleet.restarts == 1
    assert fleet.unconfirmed(4) == []
    assert handles[0].server.state()["pid"] != before
    again = await asyncio.gather(
        *(dispatcher.generate(PROMPT, SHORT, rid=f"s{n}", session=None) for n in range(4))
    )
    assert {g.engine_id for g in again} == {"engine-0", "engine-1"}


async def test_a_request_that_finds_no_engine_waits_until_they_serve_again(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    fleet = make_fleet()
    dispatcher = await serving(fleet, tiny_model, 3)
    for engine in dispatcher._engines():  # other requests were lost on them
        fleet.mark_suspect(engine, EngineLostError("lost"))
    assert not dispatcher._engines()
    found = await asyncio.gather(
        *(dispatcher.generate(PROMPT, SHORT, rid=f"r{n}", session=None) for n in range(4))
    )
    assert {g.weight_versions[0] for g in found} == {(0, 3)}
    assert dispatcher.retries == 0


async def test_a_rebuilt_engine_gets_nothing_before_it_has_the_version(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet()
    dispatcher = await serving(fleet, tiny_model, 5)
    handles[1].signal(signal.SIGKILL)
    handles[1].server._process.wait()
    await fleet.ensure(str(tiny_model))
    assert fleet.unconfirmed(5) == [1]
    found = await asyncio.gather(
        *(dispatcher.generate(PROMPT, SHORT, rid=f"r{n}", session=None) for n in range(6))
    )
    assert {g.engine_id for g in found} == {"engine-0"}


async def test_a_sample_of_another_version_is_never_returned(
    make_fleet: MakeFleet, tiny_model: Path, other_model: Path
) -> None:
    fleet = make_fleet(rollout={"attempts": 2})
    dispatcher = await serving(fleet, tiny_model, 6)
    for engine in dispatcher._engines():  # behind the fleet's back
        await engine.weights.update_from_disk(str(other_model), 99)
    with pytest.raises(EngineError, match="weight version 99, 6 is expected"):
        await dispatcher.generate(PROMPT, SHORT, rid="r", session=None)


async def test_an_engine_that_stays_paused_is_told_to_go_on_not_killed(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    fleet = make_fleet(rollout={"progress_timeout_s": 1.0})
    dispatcher = await serving(fleet, tiny_model, 7)
    held = next(engine for engine in dispatcher._engines() if engine.engine_id == "engine-0")
    await held.pause("in_place")
    found = await asyncio.gather(
        *(dispatcher.generate(PROMPT, SHORT, rid=f"r{n}", session=None) for n in range(4))
    )
    assert {g.weight_versions[0][1] for g in found} == {7}
    assert fleet.restarts == 0
    assert fleet.unconfirmed(7) == []
    assert dispatcher.retries >= 1


async def test_an_engine_that_makes_no_progress_is_replaced_and_its_requests_made_again(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet(rollout={"progress_timeout_s": 2.0})
    dispatcher = await serving(fleet, tiny_model, 8)
    running = [
        asyncio.create_task(dispatcher.generate(PROMPT, LONG, rid=f"r{n}", session=None)) for n in range(4)
    ]
    await until_generating(dispatcher)
    handles[1].signal(signal.SIGSTOP)
    found = await asyncio.gather(*running)
    assert {(len(g.output_ids), g.weight_versions[0]) for g in found} == {(1200, (0, 8))}
    assert fleet.restarts >= 1
    assert fleet.unconfirmed(8) == []


async def test_a_stalled_engine_is_replaced_although_it_answers(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    fleet = make_fleet()
    dispatcher = await serving(fleet, tiny_model, 9)
    engine = next(e for e in dispatcher._engines() if e.engine_id == "engine-1")
    fleet.mark_suspect(engine, EngineStalledError("no token"))
    assert fleet.unconfirmed(9) == [1]
    found = await dispatcher.generate(PROMPT, SHORT, rid="r", session=None)
    assert found.engine_id == "engine-0"
    await recovery(fleet, tiny_model)(9)
    assert fleet.unconfirmed(9) == []
    assert fleet.restarts == 1


async def test_an_engine_killed_while_weights_are_published_is_rebuilt_with_them(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet()
    await serving(fleet, tiny_model, 9)
    handles[0].signal(signal.SIGKILL)
    await fleet.update_weights(str(tiny_model), 10)
    assert fleet.unconfirmed(10) == []
    assert fleet.restarts == 1


async def test_weights_come_by_url_to_every_engine_and_no_copy_stays(
    make_fleet: MakeFleet, tiny_model: Path, other_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet()
    await fleet.ensure(str(tiny_model))
    await fleet.update_weights(str(other_model), 50)
    wanted = await fleet.checksums([0, 1])
    await fleet.update_weights(str(tiny_model), 51)
    with pytest.raises(MissingFileError, match="no such folder"):
        await fleet.update_weights(f"file://{other_model}/nothing", 52)
    assert fleet.unconfirmed(51) == []  # nothing was asked of them
    seconds = await fleet.update_weights(f"file://{other_model}", 52)
    assert seconds["fetch"] > 0
    assert fleet.unconfirmed(52) == []
    assert await fleet.checksums([0, 1]) == wanted
    name = handles[0].server.config.run.name
    assert not list(Path("/dev/shm").glob(f"millrace-{name}-engine-*"))


async def test_tensors_that_are_not_those_of_the_export_are_named(
    make_fleet: MakeFleet, tiny_model: Path, other_model: Path
) -> None:
    fleet = make_fleet()
    await fleet.ensure(str(tiny_model))
    await fleet.update_weights(str(tiny_model), 60)
    await fleet.verify(str(tiny_model), 60, [0, 1])
    with pytest.raises(
        EngineError, match=r"version 60 .*: engine-0 in \S*model\.\S+, .* and \d+ more; engine-1 in"
    ):
        await fleet.verify(str(other_model), 60, [0, 1])


def test_checksums_differ_by_tensor_on_any_gpu() -> None:
    """SGLang's answer has a rank's checksums once a GPU, beside one of them all."""

    def answer(*gpus: dict[str, str]) -> dict[str, Any]:
        return {"success": True, "ranks": [{"checksums": gpu, "per_gpu_checksum": str(gpu)} for gpu in gpus]}

    one = answer({"a": "1", "b": "2"}, {"a": "1", "b": "2"})
    assert differing_tensors(one, one) == []
    assert differing_tensors(one, answer({"a": "1", "b": "2"}, {"a": "1", "b": "3"})) == ["b"]
    assert differing_tensors(one, answer({"a": "0", "b": "2"}, {"a": "0"})) == ["a", "b"]
    assert differing_tensors({"message": "1"}, {"message": "2"}) == []


async def test_requests_left_behind_are_ended_before_new_weights_come(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    fleet = make_fleet()
    dispatcher = await serving(fleet, tiny_model, 11)
    left = [
        asyncio.create_task(engine.generate(PROMPT, LONG, rid="left", progress_timeout_s=60))
        for engine in dispatcher._engines()
    ]
    await until_generating(dispatcher)
    await fleet.update_weights(str(tiny_model), 12)
    for ended in await asyncio.gather(*left):
        assert ended.finish == "abort"
        assert [version for _, version in ended.weight_versions] == [11]
    assert fleet.unconfirmed(12) == []


def test_no_request_is_named_by_the_beginning_of_another() -> None:
    ids = [request_id(rid, attempt) for rid in ("e-1", "e-10", "e-11") for attempt in (0, 1, 10)]
    assert not [(one, other) for one in ids for other in ids if one != other and other.startswith(one)]


async def test_refused_weights_leave_the_engines_generating(
    make_fleet: MakeFleet, tiny_model: Path, tmp_path: Path
) -> None:
    fleet = make_fleet()
    dispatcher = await serving(fleet, tiny_model, 11)
    engines = dispatcher._engines()
    with pytest.raises(EngineError, match="config.json"):
        await fleet.update_weights(str(tmp_path), 12)
    assert fleet.unconfirmed(12) == [0, 1]
    for engine in engines:
        assert not (await engine.server_info())["paused"]


async def test_no_more_restarts_than_the_budget(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet(engines={"restarts": 0})
    await serving(fleet, tiny_model, 13)
    handles[0].signal(signal.SIGKILL)
    handles[0].server._process.wait()
    with pytest.raises(EngineError, match="engines.restarts = 0 is spent"):
        await fleet.ensure(str(tiny_model))


async def test_a_refused_request_is_not_tried_again(make_fleet: MakeFleet, tiny_model: Path) -> None:
    dispatcher = await serving(make_fleet(), tiny_model, 14)
    with pytest.raises(EngineError, match="temperature"):
        await dispatcher.generate(PROMPT, {**SHORT, "temperature": -1.0}, rid="r", session=None)
    assert dispatcher.retries == 0


async def test_a_cancelled_request_ends_at_the_engine(make_fleet: MakeFleet, tiny_model: Path) -> None:
    dispatcher = await serving(make_fleet(), tiny_model, 15)
    running = [
        asyncio.create_task(dispatcher.generate(PROMPT, LONG, rid=f"r{n}", session=None)) for n in range(2)
    ]
    await until_generating(dispatcher)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for engine in dispatcher._engines():
        for _ in range(100):
            if not (await engine.server_info())["load"]["running"]:
                break
            await asyncio.sleep(0.01)
        assert (await engine.server_info())["load"]["running"] == 0
        assert engine.in_flight == 0
