"""Reservations on a real cluster of two nodes that say they have two GPUs each."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import ray

from millrace.connectors.host.own_addresses import NAMES
from millrace.connectors.ray import actors, cluster, placement
from millrace.core.config import RunConfig
from millrace.core.errors import ActorLostError, ConfigError
from millrace.tasks.runtime.cluster import check_network
from tests.support.held_parts import Counter
from tests.support.ray_nodes import RayNodes, ray_nodes, token_of

if sys.platform != "linux":
    pytest.skip("other systems have one loopback address", allow_module_level=True)

HELD = {"start": 1}
DEAD = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=":")
        with ray_nodes(cpus=4, gpus=2) as found, token_of(found):
            yield found


@pytest_asyncio.fixture
async def joined_nodes(nodes: RayNodes, request: pytest.FixtureRequest) -> AsyncIterator[RayNodes]:
    cluster.start_or_join(nodes.address, request.node.name)
    yield nodes
    await actors.end()
    placement.release()
    cluster.leave()


def config(nodes: RayNodes, **sections: dict[str, Any]) -> RunConfig:
    values = {
        "run": {"name": "a", "iterations": 1},
        "model": {"path": "m"},
        "data": {"sources": [{"path": "d.jsonl"}]},
        "placement": {"ray_address": nodes.address, "wait_s": 20, **sections.pop("placement", {})},
    }
    return RunConfig.model_validate({**values, **sections})


async def free_gpus(wanted: int) -> None:
    """The GPUs that nobody has, as nodes come to report them."""
    for _ in range(1000):
        found = ray.available_resources().get("GPU", 0)
        if found == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{found} GPUs are free, not {wanted}")


def make(role: str, places: list[placement.ActorPlacement]) -> list[actors.Actor]:
    return [actors.make(role, i, len(places), Counter, HELD, place) for i, place in enumerate(places)]


async def test_apart_every_actor_sees_its_own_gpus_and_is_found_where_it_was_put(
    joined_nodes: RayNodes,
) -> None:
    settings = config(joined_nodes, trainer={"world_size": 2}, engines={"count": 1, "gpus": 2})
    reservation = placement.Reservation(settings)
    ranks = actors.ActorGroup(make("trainer", reservation.places("trainer")))
    engine = make("engine", reservation.places("engine"))[0]
    states, served = await ranks.states(), await engine.state()
    assert [state["gpus"] for state in states] == ["0", "1"]
    assert served["gpus"] == "0,1"
    assert states[0]["node"] == states[1]["node"] != served["node"]
    assert {states[0]["address"], served["address"]} == {"127.0.0.2", "127.0.0.3"}
    await free_gpus(0)  # no other run may have them
    later = placement.Reservation(settings)  # as of a driver that comes after a crash
    assert [place.node for place in later.places("trainer")] == [state["node"] for state in states]
    assert [place.environment for place in later.places("engine")] == [{"CUDA_VISIBLE_DEVICES": "0,1"}]
    assert await actors.find_alive("engine", 0, Counter)


@ray.remote(num_cpus=0, runtime_env={"env_vars": {"HTTP_PROXY": DEAD}})
def unproxied() -> str:
    return os.environ["NO_PROXY"]


@pytest.mark.slow
async def test_a_proxy_is_not_asked_for_the_clusters_nodes(
    nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the driver, in its actors, and in processes for tasks on a node whose environment has a proxy."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HTTP_PROXY", DEAD)
    cluster.start_or_join(nodes.address, "proxied")
    try:
        reservation = placement.Reservation(config(nodes, trainer={"device": "cpu"}))
        actor = make("trainer", reservation.places("trainer"))[0]
        in_actor = await actor.call(Counter.variable, "NO_PROXY")
        for said in (os.environ["NO_PROXY"], in_actor or "", ray.get(unproxied.remote())):
            assert {"127.0.0.2", "127.0.0.3"} <= set(said.split(","))
            assert "judge.example.org" not in said
    finally:
        await actors.end()
        placement.release()
        cluster.leave()


async def test_colocated_ranks_and_engine_see_the_same_gpus(joined_nodes: RayNodes) -> None:
    settings = config(
        joined_nodes,
        trainer={"world_size": 4},
        engines={"count": 2, "gpus": 2},
        placement={"colocate": True},
    )
    reservation = placement.Reservation(settings)
    ranks, engines = reservation.places("trainer"), reservation.places("engine")
    for index, engine in enumerate(engines):
        shared = ranks[2 * index : 2 * index + 2]
        assert {place.node for place in shared} == {engine.node}
        assert engine.environment == {
            "CUDA_VISIBLE_DEVICES": ",".join(p.environment["CUDA_VISIBLE_DEVICES"] for p in shared)
        }
    assert len({place.node for place in engines}) == 2


async def test_what_uses_no_gpu_sees_none(joined_nodes: RayNodes) -> None:
    settings = config(joined_nodes, trainer={"device": "cpu"}, engines={"kind": "embedded"})
    reservation = placement.Reservation(settings)
    for role in ("trainer", "engine"):
        assert (await make(role, reservation.places(role))[0].state())["gpus"] == ""
    await free_gpus(4)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"world_size": 5}}, r"6 GPUs \(the cluster has 4"),
        ({"engines": {"gpus": 2, "count": 2}}, r"5 GPUs .*, 2 of them on one node; nodes alive: 2"),
        ({"trainer": {"world_size": 9, "device": "cpu"}}, r"10 CPUs \(the cluster has 8"),
    ],
)
async def test_too_little_room_is_told_with_the_fields(
    joined_nodes: RayNodes, sections: dict[str, Any], said: str
) -> None:
    reservation = placement.Reservation(config(joined_nodes, placement={"wait_s": 1}, **sections))
    with pytest.raises(ConfigError, match=said) as error:
        reservation.places("trainer")
    assert "trainer.world_size" in str(error.value)


async def test_a_tensor_parallel_group_spans_hosts_only_if_it_is_asked_for(joined_nodes: RayNodes) -> None:
    trainer = {"world_size": 4, "parallel": {"tensor": 4}, "device": "cuda"}
    with pytest.raises(ConfigError, match="the largest has 2 GPUs") as refused:
        placement.Reservation(config(joined_nodes, trainer=trainer), engines=False).places("trainer")
    assert refused.value.where == "trainer.parallel.tensor = 4"
    asked = config(joined_nodes, trainer=trainer, placement={"tensor_over_hosts": True})
    places = placement.Reservation(asked, engines=False).places("trainer")
    assert [place.environment for place in places] == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "0101"]
    assert len({place.node for place in places}) == 2


async def test_an_engine_spans_hosts_only_if_it_is_asked_for(joined_nodes: RayNodes) -> None:
    engines = {"kind": "sglang", "gpus": 4}
    trainer = {"device": "cpu"}
    with pytest.raises(ConfigError, match=r"4 of its GPUs .*the largest host has 2 GPUs") as refused:
        placement.Reservation(config(joined_nodes, engines=engines, trainer=trainer)).places("engine")
    assert refused.value.where == "engines.gpus = 4"
    assert "set engines.nodes=2 and placement.tensor_over_hosts=true" in refused.value.remedy
    asked = config(
        joined_nodes,
        engines={**engines, "nodes": 2},
        trainer=trainer,
        placement={"tensor_over_hosts": True},
    )
    reservation = placement.Reservation(asked)
    places = [*reservation.places("engine"), *reservation.places("engine_node")]
    assert [place.environment for place in places] == [{"CUDA_VISIBLE_DEVICES": "0,1"}] * 2
    assert len({place.node for place in places}) == 2


@pytest.mark.slow
async def test_another_size_takes_the_place_of_what_was_reserved(joined_nodes: RayNodes) -> None:
    first = placement.Reservation(config(joined_nodes, trainer={"world_size": 3}))
    rank = make("trainer", first.places("trainer"))[0]
    await rank.state()
    second = placement.Reservation(config(joined_nodes, trainer={"world_size": 1}))
    assert len(second.places("trainer")) == 1
    with pytest.raises(ActorLostError):
        await rank.state()
    await free_gpus(2)


async def test_parts_on_other_nodes_need_an_open_address_and_a_shared_folder(joined_nodes: RayNodes) -> None:
    there, here = ["127.0.0.3"], ["127.0.0.2"]
    settings = config(joined_nodes)
    check_network(settings, here, served=True)
    with pytest.raises(
        ConfigError, match=r"engines\.host = 127\.0\.0\.1: .* node 127\.0\.0\.2.*set it to 0\.0\.0\.0"
    ):
        check_network(settings, there, served=True)
    with pytest.raises(ConfigError, match=r"sync\.directory"):
        check_network(settings, there)
    check_network(
        config(joined_nodes, engines={"host": "0.0.0.0"}, sync={"directory": "/shared"}), there, served=True
    )


@pytest.mark.slow
async def test_when_a_node_dies_its_parts_move_to_one_that_has_room(joined_nodes: RayNodes) -> None:
    """Last in this file: it leaves other nodes than it found."""
    settings = config(joined_nodes, trainer={"world_size": 2}, engines={"gpus": 2}, placement={"wait_s": 60})
    reservation = placement.Reservation(settings)
    made = {role: make(role, reservation.places(role)) for role in ("trainer", "engine")}
    states = {role: await actors.ActorGroup(found).states() for role, found in made.items()}
    assert "127.0.0.3" in {found[0]["address"] for found in states.values()}
    lost, kept = sorted(states, key=lambda role: states[role][0]["address"] == "127.0.0.2")
    joined_nodes.nodes[1].kill()
    joined_nodes.add(cpus=4, gpus=2)
    with pytest.raises(ActorLostError):
        await made[lost][0].state()
    assert await actors.find_alive(lost, 0, Counter) is None  # waits until the cluster has seen the node die
    await actors.end(lost)
    again = await actors.ActorGroup(make(lost, reservation.places(lost))).states()
    assert {state["address"] for state in again} == {"127.0.0.4"}
    assert [state["gpus"] for state in again] == [state["gpus"] for state in states[lost]]
    assert [state["actor_pid"] for state in await actors.ActorGroup(made[kept]).states()] == [
        state["actor_pid"] for state in states[kept]
    ]
