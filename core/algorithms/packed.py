"""Arithmetic on the packed layout: response tokens of B samples end to end in one dimension N.

Owns sums and spreads by sample and the cleaning of masked tokens; knows nothing of what the numbers mean.
`lengths` [B] holds the response length of each sample and sums to N.
"""

from __future__ import annotations

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """At least fp32: half precision and integers become float32, float64 stays."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def clean(x: Tensor, mask: Tensor) -> Tensor:
    """x [N] or [N, k] with exact zeros, in value and gradient, where mask is 0 [N], even over NaN and infinity."""
    keep = mask.bool() if x.dim() == 1 else mask.bool()[:, None]
    return torch.where(keep, x, torch.zeros_like(x))


def segment_ids(lengths: Tensor) -> Tensor:
    """Number of the sample that each token belongs to [N]."""
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def spread(per_sample: Tensor, lengths: Tensor) -> Tensor:
    """A value of each sample [B] on each of its tokens [N]."""
    return torch.repeat_interleave(per_sample, lengths, dim=0)


def sample_sum(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Sum of x [N] over each sample's unmasked tokens [B]; a sample with none has 0."""
    total = x.new_zeros(lengths.numel())
    return total.index_add(0, segment_ids(lengths), clean(x, mask))


def sample_count(mask: Tensor, lengths: Tensor) -> Tensor:
    """Unmasked tokens of each sample [B], float32."""
    return sample_sum(torch.ones_like(mask, dtype=torch.float32), mask, lengths)


def sample_mean(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean of x [N] over each sample's unmasked tokens [B]; a sample with none has 0."""
    return sample_sum(x, mask, lengths) / sample_count(mask, lengths).clamp(min=1).to(x.dtype)
