"""A run folder and configuration without processes: what the tests of single tasks share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.user_code import session_pool
from millrace.connectors.user_code.pool import WorkerPool
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config import RunConfig
from millrace.tasks.runtime.scoring import Scoring
from tests.support.session_place import Engines, Place
from tests.support.shards_here import GROUPS, SAMPLES
from tests.support.shards_here import Engine as ShardEngine
from tests.support.shards_here import Place as ShardPlace


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


@pytest.fixture(scope="session")
def credit_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1)
    yield pool
    pool.close()


@pytest.fixture
def one_credit_worker(credit_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs of the tests have their advantages computed in one process: it loads torch, which takes two seconds."""
    monkeypatch.setattr(Scoring, "credit_worker", credit_pool)


@pytest.fixture
async def make_place(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Place]]:
    monkeypatch.setattr(session_pool, "GRACE_S", 0.5)
    pools: dict[str, SessionPool] = {}

    def made(*texts: str, fails: Callable[[str], bool] = lambda _: False, **settings: Any) -> Place:
        return Place(make_config(), Engines(*texts, fails=fails), pools, **settings)

    yield made
    for pool in pools.values():
        pool.close()


@pytest.fixture
async def engines() -> AsyncIterator[tuple[list[ShardEngine], list[str]]]:
    made = [ShardEngine(), ShardEngine()]
    async with contextlib.AsyncExitStack() as stack:
        yield made, [await stack.enter_async_context(engine.served()) for engine in made]


@pytest.fixture
def make_shards(
    make_config: Callable[..., RunConfig],
    engines: tuple[list[ShardEngine], list[str]],
) -> Callable[..., ShardPlace]:
    def made(**sections: Any) -> ShardPlace:
        rollout = {
            "prompts": GROUPS - 1,
            "samples_per_prompt": SAMPLES,
            "part_groups": 1,
            "max_failed_share": 0.2,
        }
        config = make_config(
            rollout={**rollout, **sections.pop("rollout", {})}, placement={"task_runner": "ray"}, **sections
        )
        return ShardPlace(config, engines[1])

    return made
