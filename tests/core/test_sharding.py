"""Which groups a shard has, and which runs cannot be cut into shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.core.config import RunConfig
from millrace.core.config.rules import problems
from millrace.core.sharding import WHOLE, PlacedShare, Share, in_shards, not_in_shards, shares

A, B, C = "node a", "node b", "node c"


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "a", "iterations": 1},
            "model": {"path": "model"},
            "data": {"sources": [{"path": "train.jsonl"}]},
            **sections,
        }
    )


@pytest.mark.parametrize("nodes", [[], [A], [A, A, A], [A, B], [A, B, A, B, B], [C, A, B]])
@pytest.mark.parametrize("shards", [None, 1, 2, 5])
def test_every_group_belongs_to_exactly_one_shard(nodes: list[str], shards: int | None) -> None:
    placed = shares(nodes, shards)
    for ordinal in range(60):
        assert sum(each.share.holds(ordinal) for each in placed) == 1


def test_one_shard_a_node_has_as_many_groups_as_the_node_has_engines() -> None:
    placed = shares([A, B, A, A], None)
    assert placed == [PlacedShare(Share((0, 2, 3), 4), A), PlacedShare(Share((1,), 4), B)]
    assert [sum(each.share.holds(ordinal) for ordinal in range(40)) for each in placed] == [30, 10]


def test_a_given_number_of_shards_is_spread_over_the_nodes() -> None:
    assert [each.node for each in shares([A, A, B], 4)] == [A, B, A, B]
    assert [each.node for each in shares([], 2)] == [None, None]
    assert shares([], None) == [PlacedShare(WHOLE, None)]


@pytest.mark.parametrize(
    ("share", "part"), [(WHOLE, 64), (Share((0,), 2), 32), (Share((0, 1), 3), 43), (Share((5,), 100), 1)]
)
def test_a_shard_has_its_part_of_the_samples_in_flight(share: Share, part: int) -> None:
    assert share.part_of(64) == part


REFUSED: dict[str, dict[str, Any]] = {
    "algorithm.loss": {"algorithm": {"loss": {"kind": "sft"}}},
    "pipeline.rollouts_from": {"pipeline": {"rollouts_from": "look"}},
    "pipeline.on_update": {"pipeline": {"ahead": 1, "on_update": "keep"}},
    "algorithm.teacher_server": {"algorithm": {"teacher_server": {"url": "http://host"}}},
    "engines.router": {"engines": {"kind": "sglang", "router": {}}},
    "engines.prefill": {"engines": {"kind": "sglang", "count": 2, "prefill": 1}},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_shards_cannot_do_is_refused_by_name_and_auto_leaves_it_to_the_driver(field: str) -> None:
    on_a_cluster = {"placement": {"ray_address": "10.0.0.1:6379"}}
    found = config(**REFUSED[field], **on_a_cluster)
    assert list(not_in_shards(found)) == [field]
    assert not in_shards(found)
    asked = config(**REFUSED[field], placement={"task_runner": "ray"})
    named = [problem for problem in problems(asked) if problem.field == "placement.task_runner"]
    assert len(named) == 1
    assert field in str(named[0])


@pytest.mark.parametrize(
    ("field", "advice", "changed"),
    [
        ("pipeline.on_update", "set pipeline.on_update=resend", {"ahead": 1, "on_update": "resend"}),
    ],
)
def test_what_the_refusal_advises_goes_with_shards(field: str, advice: str, changed: dict[str, Any]) -> None:
    ray = {"placement": {"task_runner": "ray"}}
    said = [str(p) for p in problems(config(**REFUSED[field], **ray)) if p.field == "placement.task_runner"]
    assert advice in said[0]
    assert "placement.task_runner" not in {p.field for p in problems(config(pipeline=changed, **ray))}


def test_every_refusal_has_a_case() -> None:
    everything: dict[str, Any] = {}
    for sections in REFUSED.values():
        for section, values in sections.items():
            everything[section] = {**everything.get(section, {}), **values}
    everything["engines"]["count"] = 2
    assert set(not_in_shards(config(**everything))) == REFUSED.keys()


def test_the_page_on_clusters_names_what_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    refused = page.partition("is refused by name")[2].partition("\n")[0]
    named = {"algorithm.loss": "supervised training", "pipeline.on_update": "`pipeline.on_update: keep`"}
    assert [field for field in REFUSED if named.get(field, f"`{field}") not in refused] == []


@pytest.mark.parametrize(
    "sections",
    [
        *({"pipeline": {"ahead": 1, "on_update": way}} for way in ("finish", "resend", "retract")),
        {"pipeline": {"select": "finish", "max_staleness": 1}},
        {"pipeline": {"eager": True}},
        {"rollout": {"flush_tokens": 32}},
        {"filter": {"oversample": 0.5}},
        {"rollout": {"session": {"function": "package.module:function"}}},
        {"evaluation": {"background": True, "sets": [{"name": "held_out", "path": "held_out.jsonl"}]}},
    ],
)
def test_what_goes_with_shards(sections: dict[str, Any]) -> None:
    asked = config(**sections, placement={"task_runner": "ray"})
    assert in_shards(asked)
    assert not not_in_shards(asked)
    assert "placement.task_runner" not in {problem.field for problem in problems(asked)}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({}, False),
        ({"ray_address": "10.0.0.1:6379"}, True),
        ({"ray_address": "10.0.0.1:6379", "task_runner": "local"}, False),
        ({"task_runner": "ray"}, True),
    ],
)
def test_auto_takes_shards_on_a_cluster_that_the_run_joins(placement: dict[str, Any], expected: bool) -> None:
    assert in_shards(config(placement=placement)) == expected


@pytest.mark.parametrize("runner", ["auto", "local"])
def test_shards_without_ray_are_refused(runner: str) -> None:
    found = problems(config(placement={"task_runner": runner}, rollout={"shards": 2}))
    assert [problem.field for problem in found] == ["rollout.shards"]
    assert not problems(config(placement={"task_runner": "ray"}, rollout={"shards": 2}))
