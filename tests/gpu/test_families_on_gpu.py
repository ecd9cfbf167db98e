"""Each family's trainer on one GPU is Hugging Face's class: log-probabilities, gradients, steps and exports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from millrace.core.families.registry import BUILT_IN
from tests.support import gpu_families as families

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family.name: (family.name, {}) for family in BUILT_IN},
    "mistral with windows": ("mistral", {"sliding_window": 8}),
    "gpt_oss of one key head": ("gpt_oss", {"num_key_value_heads": 1}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}
pytestmark = pytest.mark.timeout(300)


@contextmanager
def trainer(folder: Path) -> Iterator[families.Everywhere]:
    """A rank alone that holds a folder's weights."""
    from millrace.connectors.trainers.megatron.rank import TrainerRank

    rank = TrainerRank(families.settings(folder, "cuda"), 0, 1)
    rank.setup(rank.address())
    try:
        yield lambda function, *arguments: [function(rank, *arguments)]
    finally:
        rank.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_steps_and_exports_are_those_of_hugging_face(tmp_path: Path, kind: str) -> None:
    family, changes = KINDS[kind]
    folder = families.save_model(tmp_path / "model", family, **changes)
    steps = families.batches(tmp_path)
    with trainer(folder) as everywhere:
        families.check_logprobs(everywhere, folder, steps, "cuda")
        families.check_steps(everywhere, folder, steps, "cuda", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_hugging_face(tmp_path: Path, kind: str) -> None:
    family, changes = KINDS[kind]
    folder = families.save_model(tmp_path / "model", family, **families.smooth(family), **changes)
    with trainer(folder) as everywhere:
        families.check_gradients(everywhere, folder, families.batches(tmp_path), "cuda", tmp_path)
