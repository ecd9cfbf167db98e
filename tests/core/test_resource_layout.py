"""ResourceLayout of runs on clusters with and without GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.config import RunConfig
from millrace.core.config.plan.layout import Slot, resource_layout


def config(**sections: dict[str, Any]) -> RunConfig:
    values = {
        "run": {"name": "a", "iterations": 1},
        "model": {"path": "m"},
        "data": {"sources": [{"path": "d.jsonl"}]},
    }
    return RunConfig.model_validate({**values, **sections})


def test_without_gpus_every_rank_and_engine_has_a_cpu_to_itself() -> None:
    found = resource_layout(config(trainer={"world_size": 2}, engines={"count": 2, "gpus": 1}), gpus=False)
    assert found.bundles == [{"CPU": 1}] * 4
    assert [slot.bundle for slot in found.of["trainer"]] == [0, 1]
    assert [slot.bundle for slot in found.of["engine"]] == [2, 3]
    assert not any(slot.gpus for role in found.of.values() for slot in role)


def test_apart_an_engines_gpus_are_one_bundle_and_ranks_have_bundles_of_their_own() -> None:
    found = resource_layout(config(trainer={"world_size": 2}, engines={"count": 2, "gpus": 4}), gpus=True)
    assert found.bundles == [{"CPU": 1, "GPU": 1}] * 2 + [{"CPU": 4, "GPU": 4}] * 2
    assert found.of["trainer"] == [Slot(0, range(1)), Slot(1, range(1))]
    assert found.of["engine"] == [Slot(2, range(4)), Slot(3, range(4))]
    assert found.needed == {"CPU": 10, "GPU": 10}


def test_a_tensor_parallel_group_is_one_bundle() -> None:
    found = resource_layout(config(trainer={"world_size": 4, "parallel": {"tensor": 2}}), gpus=True)
    assert found.bundles == [{"CPU": 2, "GPU": 2}] * 2 + [{"CPU": 1, "GPU": 1}]
    assert found.of["trainer"] == [
        Slot(0, range(1)),
        Slot(0, range(1, 2)),
        Slot(1, range(1)),
        Slot(1, range(1, 2)),
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_a_tensor_parallel_group_that_may_span_hosts_is_a_bundle_of_each_gpu(shared: bool) -> None:
    found = resource_layout(
        config(
            trainer={"world_size": 4, "parallel": {"tensor": 4}},
            engines={"count": 4, "gpus": 1},
            placement={"tensor_over_hosts": True, "colocate": shared},
        ),
        gpus=True,
    )
    assert found.bundles == [{"CPU": 1, "GPU": 1}] * (4 if shared else 8)
    assert found.of["trainer"] == [Slot(rank, range(1)) for rank in range(4)]


def test_an_engine_over_nodes_is_a_bundle_on_each() -> None:
    found = resource_layout(
        config(
            trainer={"world_size": 2},
            engines={"kind": "sglang", "count": 2, "gpus": 8, "nodes": 4},
            placement={"tensor_over_hosts": True},
        ),
        gpus=True,
    )
    assert found.bundles == [{"CPU": 1, "GPU": 1}] * 2 + [{"CPU": 2, "GPU": 2}] * 8
    assert found.of["engine"] == [Slot(2, range(2)), Slot(6, range(2))]
    assert found.of["engine_node"] == [Slot(at, range(2)) for at in (3, 4, 5, 7, 8, 9)]


def test_colocated_each_node_of_an_engine_has_the_gpus_of_its_ranks() -> None:
    found = resource_layout(
        config(
            trainer={"world_size": 8, "parallel": {"tensor": 4}},
            engines={"kind": "sglang", "count": 2, "gpus": 4, "nodes": 2},
            placement={"tensor_over_hosts": True, "colocate": True},
        ),
        gpus=True,
    )
    assert found.bundles == [{"CPU": 2, "GPU": 2}] * 4
    assert found.of["trainer"] == [Slot(rank // 2, range(rank % 2, rank % 2 + 1)) for rank in range(8)]
    assert found.of["engine"] == [Slot(0, range(2)), Slot(2, range(2))]
    assert found.of["engine_node"] == [Slot(1, range(2)), Slot(3, range(2))]


def test_without_gpus_embedded_engines_span_nothing() -> None:
    engines = {"gpus": 2, "nodes": 2}
    found = resource_layout(config(engines=engines, placement={"tensor_over_hosts": True}), gpus=False)
    assert found.bundles == [{"CPU": 1}] * 2
    assert found.of["engine_node"] == []


@pytest.mark.parametrize(("tensor", "gpus"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (3, 2)])
def test_colocated_an_engine_has_exactly_the_gpus_of_its_ranks(tensor: int, gpus: int) -> None:
    world = 12
    found = resource_layout(
        config(
            trainer={"world_size": world, "parallel": {"tensor": tensor}},
            engines={"count": world // gpus, "gpus": gpus},
            placement={"colocate": True},
        ),
        gpus=True,
    )
    assert found.needed == {"CPU": world, "GPU": world}

    def of(slot: Slot) -> set[tuple[int, int]]:
        return {(slot.bundle, number) for number in slot.gpus}

    ranks = found.of["trainer"]
    assert len(set.union(*map(of, ranks))) == world
    for index, engine in enumerate(found.of["engine"]):
        assert of(engine) == set.union(*map(of, ranks[index * gpus : (index + 1) * gpus]))
    for first in range(0, world, tensor):
        assert len({rank.bundle for rank in ranks[first : first + tensor]}) == 1


@pytest.mark.parametrize(
    ("sections", "gpus", "bundles"),
    [
        ({"trainer": {"device": "cpu"}}, True, [{"CPU": 1}, {"CPU": 1, "GPU": 1}]),
        (
            {"trainer": {"device": "cuda"}, "engines": {"kind": "embedded"}},
            True,
            [{"CPU": 1, "GPU": 1}, {"CPU": 1}],
        ),
        ({"trainer": {"device": "cuda"}}, False, [{"CPU": 1, "GPU": 1}, {"CPU": 1}]),  # and cannot be had
        ({"engines": {"kind": "external", "addresses": ["http://h:1"]}}, True, [{"CPU": 1, "GPU": 1}]),
        ({"algorithm": {"loss": "sft"}}, False, [{"CPU": 1}]),
    ],
)
def test_a_gpu_is_reserved_for_what_uses_one(
    sections: dict[str, Any], gpus: bool, bundles: list[dict[str, int]]
) -> None:
    assert resource_layout(config(**sections), gpus).bundles == bundles


def test_a_replay_reserves_nothing_for_engines() -> None:
    found = resource_layout(config(engines={"count": 3}), gpus=False, engines=False)
    assert found.bundles == [{"CPU": 1}]
    assert found.of["engine"] == []
