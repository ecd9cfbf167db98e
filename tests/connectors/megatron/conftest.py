"""Processes for trainer ranks, and tiny models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_ranks import VOCAB, Workers, samples, write_batch


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
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
            made[key] = _save(tmp_path_factory.mktemp(kind), kind, changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def batch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three iterations of one step each, in three files: a template of URLs by step."""
    folder = tmp_path_factory.mktemp("batches")
    for step in range(1, 7):
        write_batch(folder / str(step), samples(step))
    return str(folder / "{}" / "batch.parquet")


def _save(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    import transformers

    names = {
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
        "qwen2": "Qwen2",
        "llama": "Llama",
    }
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if kind == "qwen3_moe":
        values |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    config = getattr(transformers, f"{names[kind]}Config")(**{**values, **changes})
    torch.manual_seed(1)
    made = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
    with torch.no_grad():  # norms and biases start at 1 and 0, which would hide a mix-up
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return folder
