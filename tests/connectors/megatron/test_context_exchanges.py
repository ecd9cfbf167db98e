"""What context parallel ranks exchange for a token around attention: heads, keys and values, or latents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.registry import BUILT_IN
from tests.support.trainer_ranks import Workers, configuration, log_probabilities, samples, write_batch

CONTEXT = 2


@dataclass
class Case:
    """A model, and the numbers that a rank sends of each of its tokens in a layer's forward pass."""

    model: tuple[str, dict[str, Any]]
    all_to_all: Callable[[Architecture], int]
    gathered: Callable[[Architecture], int]


LATENT = {family.name for family in BUILT_IN if family.has("linear_kv_up_proj.weight")}
CASES = {
    **{
        f"{name}, latents, and heads of queries": Case(
            (name, {}),
            lambda arch: arch.heads * (arch.head_dim + arch.value_dim) // CONTEXT,
            lambda arch: arch.kv_rank + arch.rotary,
        )
        for name in sorted(LATENT)
    },
    "latents, of three heads": Case(
        ("deepseek_v3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
        lambda arch: 0,
        lambda arch: arch.kv_rank + arch.rotary,
    ),
    "heads": Case(
        ("qwen3", {}),
        lambda arch: (2 * arch.heads + 2 * arch.kv_heads) * arch.head_dim // CONTEXT,
        lambda arch: 0,
    ),
    "keys and values, of one key head": Case(
        ("qwen3", {"num_key_value_heads": 1}),
        lambda arch: 0,
        lambda arch: 2 * arch.kv_heads * arch.head_dim,
    ),
}


def sent(rank: Any, url: str) -> tuple[int, dict[str, int]]:
    """A rank's tokens in a forward pass over a batch, and how many numbers it sends in it to others, by collective."""
    import torch.distributed as dist

    from millrace.connectors.trainers import context_parallel
    from millrace.connectors.trainers.packing import make_packs

    counts: Counter[str] = Counter()

    class Counted:
        """torch.distributed as context_parallel calls it."""

        @staticmethod
        def all_to_all_single(received: Any, sent: Any, group: Any) -> None:
            counts["all_to_all"] += sent.numel() - sent.numel() // group.size()  # one part stays
            dist.all_to_all_single(received, sent, group=group)

        @staticmethod
        def all_gather_into_tensor(parts: Any, local: Any, group: Any) -> None:
            counts["gathered"] += local.numel() * (group.size() - 1)
            dist.all_gather_into_tensor(parts, local, group=group)

    module: Any = context_parallel
    module.dist = Counted
    try:
        log_probabilities(rank, url)
    finally:
        module.dist = dist
    packs = make_packs(
        rank._read(url), rank.config, rank.learner.architecture, rank.device, rank.learner.place
    )
    return sum(pack.bounds[-1] for pack in packs) // CONTEXT, dict(counts)


@pytest.mark.parametrize("name", CASES)
def test_a_token_costs_what_its_layout_says(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    family, changes = case.model
    folder = model(family, **changes)
    arch = architecture(read_hf_config(str(folder)))
    url = write_batch(tmp_path, samples(1))
    with workers.group(configuration(folder, CONTEXT, parallel={"context": CONTEXT})) as group:
        for tokens, counts in group.run(sent, url):
            assert tokens
            assert counts.get("all_to_all", 0) == tokens * arch.layers * case.all_to_all(arch)
            assert counts.get("gathered", 0) == tokens * arch.layers * case.gathered(arch)
