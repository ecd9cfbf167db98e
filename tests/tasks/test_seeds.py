"""No draw and no seed follows from what a run is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.core.config import RunConfig
from millrace.core.contracts.ids import sample_id
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.sample_prompts import draw_groups

MakeConfig = Callable[..., RunConfig]
Drawn = list[dict[str, Any]]


@pytest.fixture
def drawn(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Drawn]:
    """drawn(run name): the groups of an iteration, each with its samples' ids and seeds."""
    build_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def draw(name: str) -> Drawn:
        config = make_config(
            run={"name": name},
            model={"path": str(tmp_path / "model")},
            data={"sources": [{"name": "sums", "path": str(tmp_path / "train.jsonl")}]},
        )
        runtime = Runtime(config)
        groups = draw_groups(IterationContext(runtime, 0), config.rollout.prompts, 6)[0]
        return [
            asdict(group)
            | {"samples": [sample_id(group.group_id, index) for index in range(4)]}
            | {"seeds": [runtime.prompts.sample_seed(group, index) for index in range(4)]}
            for group in groups
        ]

    return draw


def test_two_runs_of_one_configuration_differ_in_ids_alone(drawn: Callable[..., Drawn]) -> None:
    one, other = drawn("a"), drawn("b")
    assert len({seed for group in one for seed in group["seeds"]}) == 32
    for left, right in zip(one, other, strict=True):
        assert {name for name in left if left[name] != right[name]} == {"group_id", "samples"}
