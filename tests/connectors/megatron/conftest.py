"""Processes for trainer ranks, and tiny models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import save_tiny_model
from tests.support.trainer_ranks import VOCAB, Workers, folders_of, write_batches


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Ended with the module's tests, though forking ranks takes a moment: idle ones take a good part of a core."""
    pool = Workers()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model: model(kind, **config); the same arguments give the same weights."""

    def save(folder: Path, kind: str, **changes: Any) -> Path:
        return save_tiny_model(folder, kind, VOCAB, **changes)

    return folders_of(save, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def batch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three iterations of one step each, in three files: a template of URLs by step."""
    return write_batches(tmp_path_factory.mktemp("batches"), 6)
