"""An advantage estimator: only the best samples of a prompt are reinforced, nothing is pushed down."""

from __future__ import annotations

import torch
from torch import Tensor


def best_of_group(rewards: Tensor, group_ids: Tensor, *, push: float = 1.0) -> Tensor:
    """`push` for samples with the best reward of their group, if it is better than another's; 0 for all others."""
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        best = rewards[members].max()
        if best > rewards[members].min():
            advantages[members & (rewards == best)] = push
    return advantages
