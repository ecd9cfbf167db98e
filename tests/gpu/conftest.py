"""Tests for a GPU host: `python -m pytest tests/gpu`. Nothing is collected where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "flows"), str(TESTS / "connectors"), str(TESTS / "connectors" / "megatron")]

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
