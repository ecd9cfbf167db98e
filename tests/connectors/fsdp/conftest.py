"""Processes for trainer ranks, and a tiny model of a family that core.families does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import save_tiny_model
from tests.support.trainer_ranks import VOCAB, Workers, folders_of, write_batches


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers()
    yield pool
    pool.close()


def save_gemma3(folder: Path) -> Path:
    """A text model of three layers, two with windows: scaled embeddings, norms of centred weights, tied output layer."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model by its family; the same arguments give the same weights."""

    def save(folder: Path, kind: str, **changes: Any) -> Path:
        return save_gemma3(folder) if kind == "gemma3" else save_tiny_model(folder, kind, VOCAB, **changes)

    return folders_of(save, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def batch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three iterations of one step each: a template of URLs by step."""
    return write_batches(tmp_path_factory.mktemp("batches"), 3)
