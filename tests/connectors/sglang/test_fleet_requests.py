"""Requests to a fleet of real engines: choice, kills in the middle, deadlines."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest

from millrace.connectors.engines.client import GenerateRequest
from millrace.connectors.engines.dispatcher import new_sender, request_id
from millrace.core.errors import EngineError, EngineLostError, EngineStalledError
from tests.support.fleets import (
    LONG,
    PROMPT,
    SHORT,
    MakeFleet,
    assert_idle,
    recovery,
    serving,
    until_generating,
)
from tests.support.local_handle import LocalHandle


async def test_a_request_outlives_a_recovery_that_leaves_no_engine_serving(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    """As when another request loses the engine between the recovery and this request's choice."""
    fleet = make_fleet()
    await fleet.ensure(str(tiny_model))
    recoveries = []

    async def recover(version: int) -> None:
        recoveries.append(version)
        if len(recoveries) == 2:
            await fleet.update_weights(str(tiny_model), version)

    dispatcher = fleet.dispatcher(31, recover)
    assert (await dispatcher.generate(PROMPT, SHORT, rid="patient", session=None)).finish == "length"
    assert len(recoveries) == 2


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
    assert all(
        g.output_ids.tolist() == undisturbed.output_ids.tolist() for g in found
    )  # the same seed is the same sample
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
    fleet = make_fleet(rollout={"progress_timeout_s": 1.0})
    dispatcher = await serving(fleet, tiny_model, 8)
    running = [
        asyncio.create_task(dispatcher.generate(PROMPT, LONG, rid=f"r{n}", session=None)) for n in range(4)
    ]
    await until_generating(dispatcher)
    handles[1].signal(signal.SIGSTOP)
    found = await asyncio.gather(*running)
    assert {(len(g.output_ids), g.weight_versions[0]) for g in found} == {(LONG["max_new_tokens"], (0, 8))}
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


async def test_requests_left_behind_are_ended_before_new_weights_come(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    fleet = make_fleet()
    dispatcher = await serving(fleet, tiny_model, 11)
    left_behind = GenerateRequest(input_ids=PROMPT, sampling_params=LONG, rid="left", progress_timeout_s=60)
    left = [asyncio.create_task(engine.generate(left_behind)) for engine in dispatcher._engines()]
    await until_generating(dispatcher)
    await fleet.update_weights(str(tiny_model), 12)
    for ended in await asyncio.gather(*left):
        assert ended.finish == "abort"
        assert [version for _, version in ended.weight_versions] == [11]
    assert fleet.unconfirmed(12) == []


def test_no_request_is_named_by_the_beginning_of_another() -> None:
    senders = new_sender(), new_sender()
    ids = [
        request_id(rid, attempt, sender)
        for rid in ("e-1", "e-10", "e-11")
        for attempt in (0, 1, 10)
        for sender in senders
    ]
    assert len(set(ids)) == len(ids)
    assert not [(one, other) for one in ids for other in ids if one != other and other.startswith(one)]


@pytest.mark.slow
async def test_an_answer_that_another_dispatcher_goes_on_with_is_not_ended_when_the_engine_ends_the_first_part_late(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    """As SGLang 0.5.17 does two seconds after a stream: it ends what has the id of the request that was streamed."""
    fleet = make_fleet()
    first = await serving(fleet, tiny_model, 13)
    second = await serving(fleet, tiny_model, 13)
    rids = ["r0", "r1"]
    running = [asyncio.create_task(first.generate(PROMPT, LONG, rid=rid, session=None)) for rid in rids]
    await until_generating(first)
    ended = list(first._in_flight.items())
    await first.stop()
    begun = [len((await each).output_ids) for each in running]
    more = [
        asyncio.create_task(
            second.generate([*PROMPT, *[7] * made], LONG, rid=rid, session=None, continued=made)
        )
        for rid, made in zip(rids, begun, strict=True)
    ]
    await until_generating(second)
    for name, engine in ended:
        await engine.abort(name)
    assert [answer.finish for answer in await asyncio.gather(*more)] == ["length"] * 2
    assert second.retries == 0


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
    await assert_idle(dispatcher)
    assert all(engine.in_flight == 0 for engine in dispatcher._engines())
