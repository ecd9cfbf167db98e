"""Processes for trainer ranks, and tiny models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import save_tiny_model
from tests.support.trainer_ranks import VOCAB, Workers, samples, write_batch


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Ended with the module's tests, though forking ranks takes a moment: idle ones take a good part of a core."""
    pool = Workers()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model: model(kind, **config); the same arguments give the same weights."""
    made: dict[str, Path] = {}

    def make(kind: str = "qwen3", **changes: Any) -> Path:
        key = f"{kind}/{sorted(changes.items())}"
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp(kind), kind, VOCAB, **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def batch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three iterations of one step each, in three files: a template of URLs by step."""
    folder = tmp_path_factory.mktemp("batches")
    for step in range(1, 7):
        write_batch(folder / str(step), samples(step))
    return str(folder / "{}" / "batch.parquet")
