"""A tiny model whose logits are peaked, so that log-probabilities differ and samplers have something to cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine_process import peaked_model

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folder of the model that engines serve in tests."""
    return peaked_model(tmp_path_factory.mktemp("served") / "model", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return peaked_model(tmp_path_factory.mktemp("served") / "other", seed=1)
