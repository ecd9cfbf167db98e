"""Policy losses, one value a token. fp32 inside; what the gradient flows through is said in each docstring."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), all [N]; returns per-token loss and clip indicator.

    max(-r·A, -clip(r, 1 - clip_low, 1 + clip_high)·A); with `dual_clip` c > 1, tokens with A < 0 are bounded by -c·A
    (arXiv:1912.09729, eq. 5). Gradient through `logprobs`.
    """
    ratio = (logprobs.float() - old_logprobs.float()).exp()
    advantages = advantages.float()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    indicator = clipped > plain
    if dual_clip is not None:
        bound = -dual_clip * advantages
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        indicator = indicator | bounded
    return loss, indicator


def sft_loss(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood [N]."""
    return -logprobs.float()
