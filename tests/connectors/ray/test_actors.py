"""Actors over a real local head: found again, called, lost, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
import pytest_asyncio

from millrace.connectors.host.process_identity import wait_ended
from millrace.connectors.ray import actors, cluster, placement
from millrace.core.errors import ActorLostError, ActorStalledError, TrainerError
from millrace.core.waits import Limit
from tests.support.held_parts import Counter, SlowToStart
from tests.support.looks_at_gpus import LooksAtGpus

TIMEOUT_S = 60
DRIVER = """
import asyncio, os, signal
from millrace.connectors.ray import actors
from millrace.connectors.ray import cluster
from tests.support.held_parts import Counter

async def main():
    cluster.start_or_join(None, "left-behind")
    made = [actors.make("counter", i, 2, Counter, {"start": 10}) for i in range(2)]
    print([await actor.call(Counter.add, i) for i, actor in enumerate(made)], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest_asyncio.fixture
async def group(joined: str) -> AsyncIterator[actors.ActorGroup[Counter]]:
    made = [actors.make("counter", index, 2, Counter, {"start": 1}) for index in range(2)]
    yield actors.ActorGroup(made)
    await actors.end()


async def test_calls_go_to_all_a_busy_one_tells_its_state_and_ending_a_role_leaves_the_others_and_other_runs(
    group: actors.ActorGroup[Counter], joined: str
) -> None:
    assert await group.call(Counter.add, 4) == [5, 5]
    working = asyncio.create_task(group.call(Counter.work, 1.5))
    for _ in range(100):
        states = await group.states()
        if all(state["busy"] for state in states):
            break
    assert [(state["index"], state["value"], state["busy"]) for state in states] == [
        (0, 5, True),
        (1, 5, True),
    ]
    assert not working.done()
    assert await working == [state["actor_pid"] for state in states]

    other = actors.make("judge", 0, 1, Counter, {"start": 3})
    await other.call(Counter.add, 0)
    assert await actors.end("counter") == 2
    assert actors.find_group("counter", 2, Counter) is None
    assert await other.call(Counter.add, 1) == 4
    cluster.start_or_join(None, "another-run")
    assert await actors.end() == 0
    cluster.start_or_join(None, joined)
    found = actors.find("judge", 0, Counter)
    assert found is not None
    assert await found.call(Counter.add, 1) == 5


@pytest.mark.slow
async def test_what_all_refuse_can_be_asked_again_and_actors_that_wait_for_one_that_failed_are_ended(
    group: actors.ActorGroup[Counter],
) -> None:
    with pytest.raises(TrainerError, match="does not divide"):
        await group.call_together(TIMEOUT_S, Counter.refuse)
    assert await group.call_together(TIMEOUT_S, Counter.add, 4) == [5, 5]
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(TrainerError, match="does not divide"):
            await group.call_together(0.2, Counter.refuse_alone, 600.0)
        for actor in group.actors:
            with pytest.raises(ActorLostError):
                await called_until_lost(actor)


async def called_until_lost(actor: actors.Actor[Counter]) -> None:
    """Call an actor that Ray was asked to end: it may answer for a moment."""
    while True:
        await actor.call(Counter.add, 1)


async def test_typed_errors_come_as_they_are_others_as_rays_and_an_actor_that_dies_in_a_call_is_lost(
    group: actors.ActorGroup[Counter],
) -> None:
    """And it can be made again."""
    with pytest.raises(TrainerError, match=r"trainer\.parallel\.tensor = 3"):
        await group.actors[0].call(Counter.refuse)
    with pytest.raises(ZeroDivisionError, match="by chance"):
        await group.actors[0].call(Counter.break_down)
    assert await group.actors[0].call(Counter.add, 1) == 2
    with pytest.raises(ActorLostError, match="counter-1"):
        await group.actors[1].call(Counter.die)
    with pytest.raises(ActorLostError, match="counter-1"):
        await group.actors[1].state()
    assert await group.actors[0].call(Counter.add, 1) == 3
    assert actors.find_group("counter", 2, Counter) is None
    again = actors.make("counter", 1, 2, Counter, {"start": 7})
    assert await again.call(Counter.add, 0) == 7


async def test_an_actor_that_is_slow_to_start_is_waited_for_and_afterwards_asked_as_any(
    joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "PING_TIMEOUT_S", 1.0)
    made = actors.make("slow", 0, 1, SlowToStart, {"start": 1, "takes_s": 2.5})
    found = actors.find("slow", 0, SlowToStart)
    assert found is not None
    with pytest.raises(ActorLostError, match="does not answer for 1 s"):
        await found.state()  # whoever did not make it cannot know that it only starts
    state = await made.state()
    os.kill(state["actor_pid"], signal.SIGSTOP)
    try:
        with pytest.raises(ActorLostError, match="does not answer for 1 s"):
            await made.state()
    finally:
        os.kill(state["actor_pid"], signal.SIGKILL)
        await actors.end()


async def test_an_actor_that_does_not_start_in_its_time_is_lost(
    joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "START_TIMEOUT_S", 0.5)
    made = actors.make("slow", 0, 1, SlowToStart, {"start": 1, "takes_s": 600})
    with pytest.raises(ActorLostError, match=r"actor slow-0 does not answer for 0\.5 s"):
        await made.state()
    assert await actors.end() == 1


@pytest.mark.slow
async def test_an_actor_killed_while_it_works_is_lost_at_once(group: actors.ActorGroup[Counter]) -> None:
    pid = (await group.actors[0].state())["actor_pid"]
    working = asyncio.create_task(group.actors[0].call(Counter.work, TIMEOUT_S * 2))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ActorLostError):
            await working


@pytest.mark.slow
async def test_actors_of_which_one_gets_something_done_are_waited_for(
    group: actors.ActorGroup[Counter],
) -> None:
    assert await group.call(Counter.add, 0) == [1, 1]  # they are there
    for actor in group.actors:
        actor.limit = Limit(2.0)
    assert await group.call_together(TIMEOUT_S, Counter.work_on, 4.0) == [0, 1]


async def test_actors_in_which_nothing_moves_are_ended_though_they_answer(
    group: actors.ActorGroup[Counter],
) -> None:
    pids = [state["actor_pid"] for state in await group.states()]
    for actor in group.actors:
        actor.limit = Limit(2.0)
    said = r"work of counter-0 to counter-1: nothing moved for 2 s \(run.progress_timeout_s\)"
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ActorStalledError, match=said):
            await group.call_together(TIMEOUT_S, Counter.work, TIMEOUT_S * 2)
    assert not wait_ended([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], TIMEOUT_S)


@pytest.mark.slow
async def test_one_actor_that_is_stopped_is_ended_and_can_be_made_again(
    group: actors.ActorGroup[Counter],
) -> None:
    actor = group.actors[1]
    pid = (await actor.state())["actor_pid"]
    actor.limit = Limit(1.0)
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(
            ActorStalledError, match="add of counter-1: nothing moved for 1 s.*counter-1 did not"
        ):
            await actor.call(Counter.add, 1)
    assert await group.actors[0].call(Counter.add, 1) == 2
    assert await actors.end("counter") <= 2
    again = actors.make("counter", 1, 2, Counter, {"start": 7})
    assert await again.call(Counter.add, 0) == 7


async def test_actors_are_found_again_after_their_driver_was_killed(ray_home: Path) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", DRIVER],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stdout.strip() == "[10, 11]", done.stderr
    assert done.returncode == -signal.SIGKILL
    cluster.start_or_join(None, "left-behind")
    found = actors.find_group("counter", 2, Counter)
    assert found is not None
    assert await found.call(Counter.add, 5) == [15, 16]
    pids = [state["actor_pid"] for state in await found.states()]
    assert await actors.end_others({"start": 10}) == 0
    assert await actors.end_others({"start": 11}) == 2
    assert actors.find("counter", 0, Counter) is None
    assert not wait_ended([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 10)


async def test_the_head_listens_on_loopback_only_scales_nothing_and_is_found_again(joined: str) -> None:
    record = cluster._read()
    assert record is not None
    processes = [psutil.Process(pid) for pid in record["pids"] if psutil.pid_exists(pid)]
    programs = {Path(each).name for process in processes for each in process.cmdline()}
    assert "dashboard.py" in programs
    assert not programs & {"monitor.py", "log_monitor.py"}
    assert cluster.local_head() == record["address"]
    listening = [
        connection
        for pid in record["pids"]
        if psutil.pid_exists(pid)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == "LISTEN"
    ]
    assert listening
    assert {connection.laddr.ip.removeprefix("::ffff:") for connection in listening} <= {"127.0.0.1", "::1"}


def page(port: int) -> bytes | None:
    """What a port answers a browser that asks for its metrics; None if nothing."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as got:
            return bytes(got.read(200))
    except (HTTPException, OSError):
        return None


RAY_CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVGet",
    "NodeManagerService/GetSystemConfig",
    "NodeManagerService/GetNodeStats",
    "CoreWorkerService/PushTask",
    "CoreWorkerService/GetCoreWorkerStats",
)


async def test_the_head_and_its_actors_answer_nobody_without_the_token(joined: str, ray_home: Path) -> None:
    """Each call is asked of every port that listens: one that is known there is refused without the token, and not with it."""
    grpc = pytest.importorskip("grpc")
    actor = actors.make("watched", 0, 1, Counter, {"start": 1})
    pid = (await actor.state())["actor_pid"]
    record = cluster._read()
    assert record is not None
    token = (ray_home / "ray-token").read_text()
    heads = [psutil.Process(number) for number in record["pids"] if psutil.pid_exists(number)]
    everything = {
        *heads,
        *(child for head in heads for child in head.children(recursive=True)),
        psutil.Process(pid),
    }
    ports = {c.laddr.port for p in everything for c in p.net_connections("inet") if c.status == "LISTEN"}

    def answered(port: int, call: str, brought: str) -> str:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            metadata = (("authorization", f"Bearer {brought}"),) if brought else ()
            try:
                channel.unary_unary(f"/ray.rpc.{call}")(b"", timeout=5, metadata=metadata)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    refused = set()
    for port in ports:
        for call in RAY_CALLS:
            without = answered(port, call, "")
            assert without in ("UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE"), (port, call)
            if without == "UNAUTHENTICATED":
                refused.add(call)
                assert answered(port, call, "ab" * 32) == "UNAUTHENTICATED"
                assert answered(port, call, token) != "UNAUTHENTICATED"
        shown = page(port)
        assert shown is None or shown.startswith(b"# HELP "), port  # figures of memory and processors
    assert refused == set(RAY_CALLS)
    assert (ray_home / "ray-token").stat().st_mode & 0o777 == 0o600
    assert await actors.end("watched") == 1


async def test_an_actors_modules_are_imported_when_it_sees_its_gpus_alone(joined: str) -> None:
    """One that looks for GPUs at its import would fix all of them for good: ranks then met on the same one."""
    here = placement.here()
    places = [replace(here, environment={placement.VISIBLE: gpu}) for gpu in ("1", "0,2")]
    made = [actors.make("looks", i, 2, LooksAtGpus, {}, place) for i, place in enumerate(places)]
    try:
        assert [(await actor.state())["at_import"] for actor in made] == ["1", "0,2"]
    finally:
        await actors.end()
