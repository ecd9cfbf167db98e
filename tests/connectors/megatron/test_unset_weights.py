"""A model is built without drawing weights: none is a number before its checkpoint is read, all are afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_ranks import Workers, configuration

SET_AT_FIRST = ("norm", "value_head")  # norms begin as ones, the critic's head as zero


def unset(rank: Any, critic: bool) -> tuple[set[str], set[str], set[str]]:
    """Parameters that hold no number before and after a folder is loaded, and all of them."""
    from millrace.connectors.trainers.megatron.model.policy_model import CriticModel, PolicyModel, build_model
    from millrace.connectors.trainers.megatron.weights.hf_folder import load_hf

    with rank._working("setup"):
        inner = build_model(rank.config, rank.hf, CriticModel if critic else PolicyModel)
        before = {name for name, weight in inner.named_parameters() if weight.isnan().all()}
        load_hf(inner, rank.config.model.path, rank.hf)
        after = {name for name, weight in inner.named_parameters() if weight.isnan().any()}
    return before, after, {name for name, _ in inner.named_parameters()}


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2", "llama"])
def test_every_weight_comes_from_the_checkpoint(
    workers: Workers, model: Callable[..., Path], kind: str, critic: bool
) -> None:
    with workers.group(configuration(model(kind))) as group:
        (before, after, every), *_ = group.run(unset, critic)
    unlike = {name for name in every - before if not any(part in name for part in SET_AT_FIRST)}
    assert all(name.endswith(".bias") for name in unlike), unlike  # which begin as zero
    assert not after
