"""Reward shaping: what is added to a sample's reward before advantages are computed.

Owns the built-in penalties; knows nothing of groups.
"""

from __future__ import annotations

from torch import Tensor

from millrace.core.algorithms.packed import upcast
from millrace.core.config.algorithm import Overlong


def overlong_penalty(lengths: Tensor, *, budget: int, buffer: int, factor: float = 1.0) -> Tensor:
    """What is added to the reward of each sample [B]: 0 up to budget - buffer tokens, then linearly to -factor at the budget.

    lengths [B], budget and buffer in tokens; float32. DAPO (arXiv:2503.14476), eq. 13.
    Errors: ValueError unless 0 < buffer <= budget.
    """
    if not 0 < buffer <= budget:
        raise ValueError(f"buffer must lie in 1..{budget} (the budget), not {buffer}")
    excess = (upcast(lengths) - (budget - buffer)) / buffer
    return -factor * excess.clamp(0, 1)


def add_overlong_penalty(rewards: Tensor, lengths: Tensor, overlong: Overlong, *, budget: int) -> Tensor:
    """Rewards [B] with the penalty of algorithm.overlong; NaN (not scored) stays NaN. budget: rollout.sampling.max_new_tokens."""
    buffer = overlong.buffer_tokens or max(1, budget // 5)
    penalty = overlong_penalty(lengths, budget=budget, buffer=buffer, factor=overlong.factor)
    return rewards + penalty.to(rewards.dtype)
