"""A run folder and configuration without processes: what the tests of single tasks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.core.config import RunConfig


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """make_config(section={...}): a configuration of two prompts and four samples each, changed by sections."""

    def make(**sections: dict[str, Any]) -> RunConfig:
        values: dict[str, Any] = {
            "run": {"name": "a", "iterations": 2},
            "model": {"path": "model"},
            "data": {"sources": [{"name": "sums", "path": "train.jsonl"}]},
            "storage": {"root": str(tmp_path)},
            "rollout": {"prompts": 2, "samples_per_prompt": 4, "sampling": {"max_new_tokens": 4}},
            "reward": {"function": "millrace.core.rewards.text:contains"},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        return RunConfig.model_validate(values)

    return make
