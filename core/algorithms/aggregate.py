"""How token losses become one number: per-sample weights fixed over the global batch, before any split.

Owns the denominators; knows nothing of losses, packs or ranks. With `weight` [B] from one of the rules below,

    loss = sum over samples b of weight_b * sum over unmasked tokens t of b of loss_t

so the loss of a global batch is a plain sum over packs and data-parallel ranks, and no split can change it.
`mask_sums` [B] is the number of unmasked response tokens of every sample of the GLOBAL batch.

Arithmetic on the packed layout is here too: response tokens of B samples end to end in one dimension N. `lengths` [B] holds the
response length of each sample and sums to N.
"""

import torch
from torch import Tensor

from millrace.core.config.algorithm import Algorithm


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


def token_mean(mask_sums: Tensor) -> Tensor:
    """Every token counts the same: weight = 1 / sum(mask_sums). DAPO (arXiv:2503.14476), eq. 8."""
    total = upcast(mask_sums).sum()
    return torch.ones_like(upcast(mask_sums)) / total.clamp(min=1)


def sequence_mean(mask_sums: Tensor, rollouts: Tensor | None = None) -> Tensor:
    """Mean over each rollout's tokens, then over rollouts that have any. GRPO (arXiv:2402.03300), eq. 3.

    rollouts [B]: which rollout each sample is of, from 0; without it each sample is one. A sample masked throughout has weight
    0, a rollout masked throughout does not count among the rollouts.
    """
    sums = upcast(mask_sums)
    of_rollout = _by_rollout(sums, rollouts)
    count = (of_rollout > 0).sum().clamp(min=1)
    own = of_rollout if rollouts is None else of_rollout[rollouts]
    return (sums > 0).to(sums.dtype) / (own.clamp(min=1) * count)


def constant(mask_sums: Tensor, length: int, rollouts: Tensor | None = None) -> Tensor:
    """Sum over tokens by a constant: weight = 1 / (rollouts * length). Dr. GRPO (arXiv:2503.20783).

    length: tokens, the generation budget. rollouts as of `sequence_mean`. Errors: ValueError unless length is positive.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, not {length}")
    sums = upcast(mask_sums)
    return torch.full_like(sums, 1.0 / (max(1, _by_rollout(sums, rollouts).numel()) * length))


def _by_rollout(sums: Tensor, rollouts: Tensor | None) -> Tensor:
    """Unmasked tokens of each rollout."""
    if rollouts is None or not rollouts.numel():
        return sums
    return sums.new_zeros(int(rollouts.max()) + 1).index_add(0, rollouts, sums)


def sample_weights(
    mask_sums: Tensor,
    config: Algorithm,
    *,
    max_length: int | None = None,
    rollouts: Tensor | None = None,
) -> Tensor:
    """Weight of each sample [B] of the global batch under the configured aggregation.

    max_length: tokens, for `constant` when the config names no `constant_length`: of the longest response.
    rollouts as of `sequence_mean`.
    Errors: ValueError when `constant` has no length from either.
    """
    if config.aggregation == "token_mean":
        return token_mean(mask_sums)
    if config.aggregation == "sequence_mean":
        return sequence_mean(mask_sums, rollouts)
    return constant(mask_sums, config.constant_length or max_length or 0, rollouts)


def undivided_weights(
    mask_sums: Tensor,
    config: Algorithm,
    *,
    max_length: int | None = None,
    rollouts: Tensor | None = None,
) -> Tensor:
    """`sample_weights` times `denominator` [B]: the weights without the division that needs the whole batch.

    Can be called with a part of the batch, if the part holds whole rollouts. Arguments and errors as of `sample_weights`.
    """
    sums = upcast(mask_sums)
    if config.aggregation == "token_mean":
        return torch.ones_like(sums)
    if config.aggregation == "sequence_mean":
        of_rollout = _by_rollout(sums, rollouts)
        own = of_rollout if rollouts is None else of_rollout[rollouts]
        return (sums > 0).to(sums.dtype) / own.clamp(min=1)
    length = config.constant_length or max_length or 0
    if length < 1:
        raise ValueError(f"length must be at least 1, not {length}")
    return torch.full_like(sums, 1.0 / length)


def denominator(mask_sums: Tensor, config: Algorithm, rollouts: Tensor | None = None) -> float:
    """What the loss of a batch is divided by in the end: its tokens, its rollouts that have any, or its rollouts."""
    sums = upcast(mask_sums)
    if config.aggregation == "token_mean":
        return max(1.0, float(sums.sum()))
    of_rollout = _by_rollout(sums, rollouts)
    if config.aggregation == "sequence_mean":
        return max(1.0, float((of_rollout > 0).sum()))
    return max(1.0, float(of_rollout.numel()))


def reduce(per_token: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """The loss of a pack (scalar): sum of weights * per_token over unmasked tokens; NaN under the mask is 0."""
    return (clean(per_token, mask) * clean(upcast(weights), mask)).sum()
