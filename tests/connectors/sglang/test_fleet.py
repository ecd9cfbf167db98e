"""A fleet of real engines: weight versions, memory, starts and restarts."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from millrace.core.errors import BudgetError, EngineError, EngineLostError, MissingFileError
from tests.support.engine_process import reference_logprobs
from tests.support.fleets import (
    LONG,
    PROMPT,
    SHORT,
    MakeFleet,
    checksums,
    generate,
    serving,
    until_generating,
)
from tests.support.flow_runs import wait_until
from tests.support.local_handle import LocalHandle


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
    assert found.logprobs == pytest.approx(
        reference_logprobs(tiny_model, PROMPT, found.output_ids.tolist()), abs=1e-4
    )


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
    assert after.output_ids.tolist() == before.output_ids.tolist()


@pytest.mark.slow
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


async def test_an_engine_that_lost_a_request_gives_its_memory_back_too(
    make_fleet: MakeFleet, tiny_model: Path
) -> None:
    """It was passed over and kept its memory, and the trainer ran out of it."""
    fleet = make_fleet()
    dispatcher = await serving(fleet, tiny_model, 25)
    for client in dispatcher._engines():
        fleet.mark_suspect(client, EngineLostError(f"{client.engine_id}: no answer"))
    await fleet.sleep()
    assert fleet._released == {0: ["weights", "kv_cache"], 1: ["weights", "kv_cache"]}
    assert len(await generate(await serving(fleet, tiny_model, 25), 4, SHORT)) == 4
    assert fleet.restarts == 0


async def test_an_engine_that_does_not_give_its_memory_back_is_ended(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet(rollout={"progress_timeout_s": 2})
    dispatcher = await serving(fleet, tiny_model, 26)
    await dispatcher._engines()[0].close()  # as one that is gone, to this client
    await fleet.sleep()
    assert not (await handles[0].state())["alive"]
    assert len(await generate(await serving(fleet, tiny_model, 26), 4, SHORT)) == 4


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
    # a killed process whose last thread is still in the kernel has ended for psutil and not for its parent
    wait_until(lambda: not handles[1].server.state()["alive"], patience_s=20)
    await fleet.ensure(str(tiny_model))
    assert alive == [[True, False]]


@pytest.mark.slow
async def test_an_engine_that_is_suspected_while_another_starts_keeps_its_requests(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    """Behind a router a lost request makes all suspect; one that comes late does so when the others were asked already."""

    killed = False

    async def make_room() -> None:
        if killed:
            fleet.mark_suspect(fleet._clients[1], EngineLostError("a late request on engine-0"))

    fleet = make_fleet(make_room)
    dispatcher = await serving(fleet, tiny_model, 27)
    running = asyncio.create_task(generate(dispatcher, 4, LONG))
    await until_generating(dispatcher)
    refit, killed = fleet._clients[1].refit, True
    handles[0].signal(signal.SIGKILL)
    await running
    assert fleet.restarts == 1
    assert dispatcher.retries == 2
    assert fleet._clients[1].refit == refit


async def test_an_engine_killed_while_weights_are_published_is_rebuilt_with_them(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet()
    await serving(fleet, tiny_model, 9)
    handles[0].signal(signal.SIGKILL)
    await fleet.update_weights(str(tiny_model), 10)
    assert fleet.unconfirmed(10) == []
    assert fleet.restarts == 1


async def test_an_engine_killed_as_it_starts_is_started_again(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    """It was not answered with an error, which would count as that of the sample that asked for engines first."""
    fleet = make_fleet()
    await serving(fleet, tiny_model, 31)
    died = handles[0].server._process
    died.kill()
    died.wait()
    ensuring = asyncio.create_task(fleet.ensure(str(tiny_model)))
    while (starts := handles[0].server._process) in (died, None):  # noqa: ASYNC110 - another thread sets it
        await asyncio.sleep(0.005)
    starts.kill()
    await ensuring
    assert fleet.restarts == 2
    assert fleet.unconfirmed(31) == [0]


async def test_weights_come_by_url_to_every_engine_and_no_copy_stays(
    make_fleet: MakeFleet, tiny_model: Path, other_model: Path, handles: list[LocalHandle]
) -> None:
    fleet = make_fleet()
    await fleet.ensure(str(tiny_model))
    await fleet.update_weights(str(other_model), 50)
    wanted = await checksums(fleet)
    await fleet.update_weights(str(tiny_model), 51)
    with pytest.raises(MissingFileError, match="no such folder"):
        await fleet.update_weights(f"file://{other_model}/nothing", 52)
    assert fleet.unconfirmed(51) == []  # nothing was asked of them
    seconds = await fleet.update_weights(f"file://{other_model}", 52)
    assert seconds["fetch"] > 0
    assert fleet.unconfirmed(52) == []
    assert await checksums(fleet) == wanted
    name = handles[0].server.config.run.name
    assert not list(Path("/dev/shm").glob(f"millrace-{name}-engine-*"))


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
    said = r"engine-0 died and engines.restarts = 0 is spent; most often: .* \(1 of 1, such as that of engine-0, whose log is .*"
    with pytest.raises(BudgetError, match=said):
        await fleet.ensure(str(tiny_model))
