"""A process outside a Ray cluster, which joins it by Ray's client server."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import ray
from ray._private import client_mode_hook

from millrace.connectors.ray import actors, client, cluster, placement
from millrace.core.config import RunConfig
from millrace.core.errors import ActorLostError, ConfigError, TrainerError
from millrace.tasks.runtime.cluster import check_network
from tests.support.held_parts import Counter
from tests.support.ray_nodes import RayNodes, token_of

if sys.platform != "linux":
    pytest.skip("other systems have one loopback address", allow_module_level=True)

pytestmark = pytest.mark.slow  # a cluster of its own, and connections that break
HELD = {"start": 1}
HEAD = "127.0.0.2"


@pytest.fixture(scope="module")
def head() -> Iterator[RayNodes]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "2")  # seconds
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=":")
        found = RayNodes()
        try:
            found.add(cpus=3).wait()
            with token_of(found):
                yield found
        finally:
            found.close()


@pytest_asyncio.fixture
async def outside(head: RayNodes, request: pytest.FixtureRequest) -> AsyncIterator[RayNodes]:
    cluster.start_or_join(head.client_address, request.node.name)
    yield head
    cluster.start_or_join(head.client_address, request.node.name)
    await actors.end()
    placement.release()
    cluster.leave()


def config(address: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "a", "iterations": 1},
            "model": {"path": "m"},
            "data": {"sources": [{"path": "d.jsonl"}]},
            "placement": {"ray_address": address, "wait_s": 20},
        }
    )


async def test_actors_are_made_found_and_asked_as_from_a_node(outside: RayNodes) -> None:
    places = placement.Reservation(config(outside.client_address)).places("engine")
    assert [place.address for place in places] == [HEAD]
    made = actors.make("counter", 0, 1, Counter, HELD, places[0])
    assert await made.call(Counter.add, 2) == 3
    with pytest.raises(TrainerError, match="does not divide 4 heads"):
        await made.call(Counter.refuse)
    cluster.leave()
    cluster.start_or_join(outside.client_address, "another")
    assert actors.find("counter", 0, Counter) is None
    cluster.leave()


async def test_a_place_here_is_on_the_node_of_the_client_server(outside: RayNodes) -> None:
    made = actors.make("counter", 0, 1, Counter, HELD, placement.here())
    assert (await made.state())["address"] == placement.here().address == HEAD
    made.kill()
    with pytest.raises(ActorLostError):
        await made.state()
    assert await actors.find_alive("counter", 0, Counter) is None


async def test_every_node_is_another_one(outside: RayNodes) -> None:
    with pytest.raises(ConfigError, match=r"outside the Ray cluster.*set it to 0\.0\.0\.0"):
        check_network(config(outside.client_address), [cluster.node_address()], served=True)


async def test_without_its_server_all_is_lost_and_found_when_joined_again(outside: RayNodes) -> None:
    made = actors.make("counter", 0, 1, Counter, HELD)
    await made.call(Counter.add, 1)
    waiting = asyncio.ensure_future(made.unwatched(Counter.work, 60.0))
    await asyncio.sleep(0.5)
    assert outside.nodes[0].kill_client_servers()
    async with asyncio.timeout(60):
        with pytest.raises(ActorLostError, match="client server"):
            await waiting
        with pytest.raises(ActorLostError):
            await made.state()
        with pytest.raises(ActorLostError):
            actors.find("counter", 0, Counter)
        with pytest.raises(ActorLostError):
            placement.here()
        await asyncio.to_thread(
            cluster.start_or_join,
            outside.client_address,
            "test_without_its_server_all_is_lost_and_found_when_joined_again",
        )
        with pytest.raises(ActorLostError):  # a handle of the connection before
            await made.state()
        found = await actors.find_alive("counter", 0, Counter)
        assert found
        assert (await found.state())["value"] == 2
    assert ray.is_initialized()


async def test_a_connection_that_broke_while_nobody_asked_is_made_again(
    outside: RayNodes, request: pytest.FixtureRequest
) -> None:
    made = actors.make("counter", 0, 1, Counter, HELD)
    await made.call(Counter.add, 1)
    vars(client.connection())["_in_shutdown"] = True  # as Ray's client does when its own tries are used up
    assert not cluster.joined()
    cluster.start_or_join(outside.client_address, request.node.name)
    found = await actors.find_alive("counter", 0, Counter)
    assert found
    assert (await found.state())["value"] == 2


def test_where_no_client_server_answers_the_field_and_a_remedy_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.util.client.worker.INITIAL_TIMEOUT_SEC", 0.1)
    monkeypatch.setattr("ray.util.client.worker.MAX_TIMEOUT_SEC", 0.1)
    with pytest.raises(
        ActorLostError, match=r"placement\.ray_address = ray://127\.0\.0\.1:9.*ray start --head"
    ):
        cluster.start_or_join("ray://127.0.0.1:9", "a")
    assert not client_mode_hook.is_client_mode_enabled, "it could not join as a node any more"


async def test_a_result_that_comes_when_nobody_waits_any_more_is_no_error(
    outside: RayNodes, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray's client logged a stack for each, in every iteration of a run in shards."""
    logging.getLogger("ray.util.client.dataclient").addHandler(caplog.handler)
    made = actors.make("counter", 0, 1, Counter, HELD)
    assert await made.call(Counter.add, 0) == 1
    given_up = [
        asyncio.create_task(made.call(Counter.work, 1.0)),
        asyncio.create_task(made.call(Counter.refuse)),
    ]
    await asyncio.sleep(0.2)
    for call in given_up:
        call.cancel()
    await asyncio.wait(given_up)
    assert all(call.cancelled() for call in given_up)
    assert await made.call(Counter.add, 1) == 2  # after the work, whose result has come
    await asyncio.sleep(0.1)
    gc.collect()
    assert not [text for text in ("Callback error", "never retrieved") if text in caplog.text]
