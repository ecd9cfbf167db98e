"""Tests for a GPU host: `python -m pytest tests/gpu`. Nothing is collected where there is no GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.support.trainer_ranks import GpuWorkers

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """What one file's tests held on the GPU is free for the engines and trainers of the next."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def workers() -> Iterator[GpuWorkers]:
    """Processes for trainer ranks, each with a GPU."""
    pool = GpuWorkers()
    yield pool
    pool.close()
