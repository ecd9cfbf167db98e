"""A run folder and configuration without processes: what the tests of single tasks share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.workers import session_pool
from millrace.core.config import RunConfig
from tests.support.session_place import Engines, Place


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


@pytest.fixture
async def make_place(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Place]]:
    monkeypatch.setattr(session_pool, "GRACE_S", 0.5)
    places: list[Place] = []

    def made(*texts: str, fails: Callable[[str], bool] = lambda _: False, **settings: Any) -> Place:
        places.append(Place(make_config(), Engines(*texts, fails=fails), **settings))
        return places[-1]

    yield made
    for place in places:
        place.pool.close()
