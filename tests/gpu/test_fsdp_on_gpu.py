"""FSDP's trainer on one GPU is Hugging Face's class: log-probabilities, steps, exports; and it gives memory back and takes it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support import gpu_families as families

KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3": ("qwen3", {}, "none"),
    "qwen3, tied, computed again": ("qwen3", {"tie_word_embeddings": True}, "full"),
    "llama": ("llama", {}, "none"),
    "mistral with windows": ("mistral", {"sliding_window": 8}, "none"),
    "qwen3_moe": ("qwen3_moe", {}, "none"),
}
pytestmark = pytest.mark.timeout(300)


@contextmanager
def trainer(folder: Path, recompute: str, **changes: Any) -> Iterator[Any]:
    """A rank alone that holds a folder's weights."""
    from millrace.connectors.trainers.fsdp.rank import FsdpRank

    rank = FsdpRank(families.settings(folder, "cuda", kind="fsdp", recompute=recompute, **changes), 0, 1)
    rank.setup(rank.address())
    try:
        yield rank
    finally:
        rank.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_steps_and_exports_are_those_of_hugging_face(tmp_path: Path, kind: str) -> None:
    family, changes, recompute = KINDS[kind]
    folder = families.save_model(tmp_path / "model", family, **changes)
    steps = families.batches(tmp_path)
    with trainer(folder, recompute) as rank:

        def everywhere(function: Any, *arguments: Any) -> list[Any]:
            return [function(rank, *arguments)]

        families.check_logprobs(everywhere, folder, steps, "cuda")
        families.check_steps(everywhere, folder, steps, "cuda", tmp_path)


@pytest.mark.parametrize("kind", ["qwen3, tied, computed again", "llama", "qwen3_moe"])
def test_adapters_start_as_the_base_and_step_as_plain_pairs(tmp_path: Path, kind: str) -> None:
    family, changes, recompute = KINDS[kind]
    folder = families.save_model(tmp_path / "model", family, **changes)
    steps = families.batches(tmp_path)
    with trainer(folder, recompute) as rank:
        base = families.trainer_logprobs(rank, steps[0][0], False)
    with trainer(folder, recompute, lora=families.LORA) as rank:
        found = families.trainer_logprobs(rank, steps[0][0], False)
        assert [name for name, each in base.items() if not torch.equal(found[name], each)] == []
        families.check_adapters(
            lambda function, *given: [function(rank, *given)], folder, steps, "cuda", tmp_path
        )


def test_a_step_after_memory_was_released_is_the_step_without_it(tmp_path: Path) -> None:
    folder = families.save_model(tmp_path / "model", "qwen3")
    steps = families.batches(tmp_path)
    norms = []
    for releases in (False, True):
        with trainer(folder, "none") as rank:
            made = []
            for version, (url, _) in enumerate(steps, start=1):
                if releases:
                    assert rank.offload() >= 0
                made.append(families.trainer_step(rank, version, url))
            norms.append(made)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
