"""Tests for a GPU host: `python -m pytest tests/gpu`. Nothing is collected where there is no GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "flows"), str(TESTS / "connectors"), str(TESTS / "connectors" / "megatron")]

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """What one file's tests held on the GPU is free for the engines and trainers of the next."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
