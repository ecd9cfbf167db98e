"""Every option of SGLang engines on one node and over two: it works, or it is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.engines.launch import EngineStart, Node
from millrace.connectors.engines.sglang.launch import launch_sglang
from millrace.core.config import RunConfig
from millrace.core.config.engines import SglangEngines
from millrace.core.config.passthrough_rules import SGLANG_ELSEWHERE, SGLANG_OWNED, SGLANG_REFUSED
from millrace.core.config.rules import problems

MEETING = "10.0.0.1:5000"
WORKS, COLOCATED = "", {"colocate": True}
Row = tuple[dict[str, Any], dict[str, dict[str, Any]], str, str]  # engines, others, field refused at 1, at 2
TABLE: dict[str, Row] = {
    "kind": ({}, {}, WORKS, WORKS),
    "host": ({"host": "0.0.0.0"}, {}, WORKS, WORKS),
    "start_timeout_s": ({"start_timeout_s": 5}, {}, WORKS, WORKS),
    "restarts": ({"restarts": 0}, {}, WORKS, WORKS),
    "router": ({"router": {}}, {}, WORKS, WORKS),
    "count": ({"count": 2}, {}, WORKS, WORKS),
    "gpus": ({"gpus": 3}, {}, WORKS, "engines.nodes"),
    "nodes": ({}, {"placement": {"tensor_over_hosts": False}}, WORKS, "engines.nodes"),
    "prefill": ({"prefill": 1, "count": 2}, {}, WORKS, "engines.prefill"),
    "sglang": ({"sglang": {"mem_fraction_static": 0.5}}, {}, WORKS, WORKS),
    "sglang: data parallel attention": (
        {"sglang": {"dp_size": 2, "enable_dp_attention": True}},
        {},
        WORKS,
        WORKS,
    ),
    "sglang: experts apart": ({"sglang": {"ep_size": 2}}, {}, WORKS, WORKS),
    "sglang: speculative": ({"sglang": {"speculative_algorithm": "EAGLE"}}, {}, WORKS, WORKS),
    "sync: broadcast": ({}, {"sync": {"kind": "broadcast"}}, WORKS, WORKS),
    "sync: a folder": ({}, {"sync": {"kind": "disk", "directory": "/shared"}}, WORKS, WORKS),
    "sync: a URL": ({}, {"sync": {"kind": "disk", "directory": "s3://b/w"}}, WORKS, "sync.directory"),
    "shared GPUs": ({}, {"placement": COLOCATED, "trainer": {"world_size": 2}}, WORKS, WORKS),
    "shared GPUs, memory kept": (
        {},
        {"placement": {**COLOCATED, "offload_engines": False}, "trainer": {"world_size": 2}},
        WORKS,
        WORKS,
    ),
    "shared GPUs, a folder": (
        {},
        {"placement": COLOCATED, "trainer": {"world_size": 2}, "sync": {"kind": "disk"}},
        WORKS,
        WORKS,
    ),
    "shards": ({}, {"placement": {"task_runner": "ray"}}, WORKS, WORKS),
    **{
        f"sglang: {name}": ({"sglang": {name: 2}}, {}, f"engines.sglang.{name}", f"engines.sglang.{name}")
        for name in (*SGLANG_OWNED, *SGLANG_ELSEWHERE, *SGLANG_REFUSED)
    },
}


def config(engines: dict[str, Any], others: dict[str, dict[str, Any]], nodes: int) -> RunConfig:
    values: dict[str, Any] = {
        "run": {"name": "a", "iterations": 1},
        "model": {"path": "m"},
        "data": {"sources": [{"path": "d.jsonl"}]},
        "engines": {"kind": "sglang", "gpus": 2, "nodes": nodes, **engines},
        **others,
    }
    values["placement"] = {"tensor_over_hosts": nodes > 1, **values.get("placement", {})}
    return RunConfig.model_validate(values)


def test_every_option_has_its_row() -> None:
    assert {name for name in SglangEngines.model_fields if name not in TABLE} == set()


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", TABLE)
def test_an_option_works_or_is_refused_by_name(name: str, nodes: int, tmp_path: Path) -> None:
    engines, others, *refused = TABLE[name]
    made = config(engines, others, nodes)
    found = {problem.field for problem in problems(made)}
    assert found == {refused[nodes - 1]} - {WORKS}
    if found:
        return
    (tmp_path / "config.json").write_text("{}")
    lines = []
    for rank in range(nodes):
        node = Node(rank, MEETING) if nodes > 1 else None
        start = EngineStart(made, str(tmp_path), 0, "10.0.0.1", "key", tmp_path, node)
        lines.append(list(launch_sglang(start).command))
    spans = {"--nnodes": str(nodes), "--dist-init-addr": MEETING} if nodes > 1 else {}
    for rank, line in enumerate(lines):
        wanted = {**spans, **({"--node-rank": str(rank)} if spans else {})}
        for flag in ("--nnodes", "--dist-init-addr", "--node-rank"):
            assert (line[line.index(flag) + 1] if flag in line else None) == wanted.get(flag)
        assert line[line.index("--host") + 1] == ("127.0.0.1" if rank else made.engines.host)
    # all else is alike on all nodes
    of_a_node = ("--node-rank", "--host", "--port", "--disaggregation-bootstrap-port")
    alike = [[word for at, word in enumerate(line) if line[at - 1] not in of_a_node] for line in lines]
    assert all(line == alike[0] for line in alike)
