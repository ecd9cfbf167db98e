"""Experts as grouped products on a GPU: equal to experts one after the other up to rounding, and to themselves bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from millrace.connectors.trainers.megatron.model.experts import one_by_one  # noqa: E402
from millrace.connectors.trainers.megatron.rank import TrainerRank  # noqa: E402
from millrace.core.contracts.task_records import StepRequest  # noqa: E402
from tests.support import expert_checks, trainer_ranks  # noqa: E402
from tests.support.tiny_models import save_tiny_model  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "gpt_oss": {"intermediate_size": 128},
}
LAYERS = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module", params=SIZES)
def rank(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerRank]:
    folder = save_tiny_model(
        tmp_path_factory.mktemp(request.param),
        request.param,
        trainer_ranks.VOCAB,
        **LAYERS,
        **SIZES[request.param],
    )
    settings = trainer_ranks.configuration(
        folder,
        device="cuda",
        dtype="bfloat16",
        max_pack_tokens=256,
        deterministic=False,
        optimizer={"weight_decay": 0.0},
    )
    made = TrainerRank(settings, 0, 1)
    made.setup(made.address())
    yield made
    made.shutdown()


@pytest.mark.parametrize("routing", expert_checks.ROUTINGS)
def test_they_equal_experts_one_after_the_other_up_to_rounding(rank: TrainerRank, routing: str) -> None:
    far = expert_checks.both_ways(rank, routing)
    assert far["output"] < 1e-2
    assert far["gradient"] < 1.5e-2


@pytest.mark.parametrize("routing", expert_checks.ROUTINGS)
@pytest.mark.parametrize("poisoned", [False, True])
def test_two_passes_have_equal_bits_whatever_memory_held_before(
    rank: TrainerRank, routing: str, poisoned: bool
) -> None:
    between = partial(expert_checks.poison, rank.device) if poisoned else torch.cuda.synchronize
    assert expert_checks.equal_again(rank, routing, between)


@pytest.mark.parametrize("routing", expert_checks.ROUTINGS)
def test_gradients_are_added_to_totals_in_fp32(rank: TrainerRank, routing: str) -> None:
    found = expert_checks.totals(rank, routing)
    assert found["far"] < 1e-5
    assert found["marked"] == found["parameters"] > 0


def test_weights_and_totals_are_read_where_they_lie(rank: TrainerRank) -> None:
    assert expert_checks.in_place(rank) == {"weights": True, "gradients": True}


@pytest.mark.parametrize("way", [nullcontext, one_by_one])
def test_log_probabilities_of_two_passes_have_equal_bits(
    rank: TrainerRank, tmp_path: Path, way: Callable[[], Any]
) -> None:
    url = trainer_ranks.write_batch(tmp_path / "batch", trainer_ranks.samples(1, count=64))
    with way():
        first, *others = [trainer_ranks.log_probabilities(rank, url) for _ in range(4)]
    assert all(other == first for other in others)


def test_a_step_changes_every_expert(rank: TrainerRank, tmp_path: Path) -> None:
    def experts() -> dict[str, torch.Tensor]:
        named = rank.policy.named_parameters()
        return {name: value.detach().clone() for name, value in named if ".experts." in name}

    before = experts()
    url = trainer_ranks.write_batch(tmp_path / "batch", trainer_ranks.samples(1, count=64))
    rank.train(StepRequest(1, url))
    assert [name for name, value in experts().items() if torch.equal(value, before[name])] == []
    assert len(before) > 8
