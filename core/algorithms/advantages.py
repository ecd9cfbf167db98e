"""Advantages from rewards. fp64 inside, so that a group's advantages sum to zero."""

from __future__ import annotations

import torch
from torch import Tensor

from core.config.algorithm import Algorithm


def group_relative(
    rewards: Tensor, group_ids: Tensor, *, divide_by_std: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """(r - mean) / (std + epsilon) within each group (GRPO, arXiv:2402.03300, section 4.1.2). [B], [B] -> [B].

    The std is Bessel-corrected and epsilon is added to it. A null reward is NaN: it leaves the statistics and gets 0.
    A group whose rewards are equal gets exact zeros, and so does a group of one.
    """
    values = rewards.double()
    out = torch.zeros_like(values)
    for group in group_ids.unique():
        member = (group_ids == group) & ~values.isnan()
        r = values[member]
        if len(r) < 2 or bool((r == r[0]).all()):
            continue
        centred = r - r.mean()
        out[member] = centred / (r.std(correction=1) + epsilon) if divide_by_std else centred
    return out.to(rewards.dtype)


def sample_advantages(rewards: Tensor, group_ids: Tensor, config: Algorithm) -> Tensor | None:
    """Advantages [B] of whole samples by the configured estimator; None where the trainer computes them by token."""
    assert config.advantage == "group_relative"
    return group_relative(rewards, group_ids, divide_by_std=config.divide_by_std)
