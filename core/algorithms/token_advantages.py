"""Advantages of tokens: the estimators that look at response tokens, on the packed layout.

Owns the formulas; `credit` composes them. Knows nothing of losses or of where numbers are stored.
Shapes: B samples, N response tokens of all samples end to end; `lengths` [B] sums to N; `mask` [N] is 1 on the policy's own tokens.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.core.algorithms.aggregate import clean, spread, upcast


def broadcast(per_sample: Tensor, lengths: Tensor) -> Tensor:
    """A sample's advantage [B] on each of its response tokens [N]."""
    return spread(per_sample, lengths)


def token_rewards(
    rewards: Tensor, kl: Tensor | None, mask: Tensor, lengths: Tensor, *, kl_coef: float
) -> Tensor:
    """Reward of each token [N]: -kl_coef * kl on unmasked tokens, plus the sample's reward on its last unmasked token.

    rewards [B] (NaN counts 0), kl [N] or None. A sample masked throughout keeps no reward.
    """
    penalty = (
        torch.zeros_like(mask, dtype=torch.float32) if kl is None else -kl_coef * clean(upcast(kl), mask)
    )
    on = mask.bool()
    later = _tail_count(on, lengths)
    last = on & (later == 1)
    return penalty + torch.where(last, spread(torch.nan_to_num(upcast(rewards)), lengths), 0.0).to(
        penalty.dtype
    )


def _tail_count(on: Tensor, lengths: Tensor) -> Tensor:
    """Unmasked tokens from each token to the end of its sample, itself included [N]."""
    running = torch.cumsum(on.long(), 0)
    ends = torch.cumsum(lengths, 0)
    at_end = torch.cat([running.new_zeros(1), running])[ends]
    return spread(at_end, lengths) - running + on.long()


def discounted_sums(x: Tensor, mask: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor * y_next over the unmasked tokens of each sample, masked ones left out of the time line [N].

    Masked tokens get 0. Runs over chunks of 128 tokens of all samples at once (a triangular product within a chunk).
    """
    on = mask.bool()
    counts = x.new_zeros(lengths.numel(), dtype=torch.long)
    number = torch.repeat_interleave(torch.arange(lengths.numel(), device=x.device), lengths)
    counts = counts.index_add(0, number, on.long())
    longest = int(counts.max()) if counts.numel() else 0
    if longest == 0:
        return torch.zeros_like(x)
    # column 0 is the last token: time runs against the columns
    column = _tail_count(on, lengths)[on] - 1
    row = number[on]
    table = x.new_zeros(lengths.numel(), longest)
    table[row, column] = x[on]
    chunk = min(128, longest)
    steps = torch.arange(chunk, device=x.device)
    gap = steps[:, None] - steps[None, :]
    powers = torch.where(
        gap >= 0, torch.tensor(factor, dtype=x.dtype, device=x.device) ** gap.clamp(min=0), 0.0
    )
    carry = x.new_zeros(lengths.numel())
    pieces: list[Tensor] = []
    for piece in torch.split(table, chunk, dim=1):
        width = piece.shape[1]
        sums = piece @ powers[:width, :width].T + carry[:, None] * factor * powers[:width, 0][None, :]
        pieces.append(sums)
        carry = sums[:, -1]
    out = torch.zeros_like(x)
    out[on] = torch.cat(pieces, 1)[row, column]
    return out


def reinforce_plus_plus(
    rewards: Tensor, kl: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float, kl_coef: float
) -> Tensor:
    """Discounted return of the KL penalty and the reward, from each token on [N].

    REINFORCE++ (arXiv:2501.03262). rewards [B], kl [N] (nats). The reward lands on the last unmasked token. Masked tokens pay
    no KL, but each is a step of the discount, as in slime (gae leaves them out of the time line): they show the return
    that passes through them, and 0 after the last unmasked token. Whitening over the batch is `whiten`'s.
    """
    per_token = token_rewards(rewards, kl, mask, lengths, kl_coef=kl_coef)
    return discounted_sums(per_token, torch.ones_like(per_token), lengths, gamma)


def reinforce_plus_plus_baseline(
    centred_rewards: Tensor, kl: Tensor | None, mask: Tensor, lengths: Tensor, *, kl_coef: float
) -> Tensor:
    """The reward less its group's mean on every unmasked token, less kl_coef * kl of that token [N].

    REINFORCE++ (arXiv:2501.03262), variant with baseline; `centred_rewards` [B] is group_relative(divide_by_std=False).
    """
    advantages = clean(spread(upcast(centred_rewards), lengths), mask)
    return advantages if kl is None else advantages - kl_coef * clean(upcast(kl), mask)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, each [N], over the unmasked tokens of each sample.

    delta_t = r_t + gamma V(next) - V_t; A_t = sum of (gamma lam)^k delta_{t+k}; returns = A + V.  GAE (arXiv:1506.02438), eq. 16.
    rewards [N] (see token_rewards), values [N]. Observation tokens (mask 0) are not steps: "next" is the next unmasked
    token, what stands on masked ones is not looked at, and they get 0 in both results.
    """
    on = mask.bool()
    r, v = clean(upcast(rewards), on), clean(upcast(values), on)
    following = torch.zeros_like(v)
    tail = _tail_count(on, lengths)[on]
    dense = v[on]
    following[on] = torch.where(tail > 1, torch.cat([dense[1:], dense.new_zeros(1)])[: dense.numel()], 0.0)
    advantages = discounted_sums(clean(r + gamma * following - v, on), on, lengths, gamma * lam)
    return advantages, clean(advantages + v, on)


def whiten(x: Tensor, mask: Tensor, group: Any = None, *, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over unmasked entries; masked ones 0. Same shape as x.

    x [N] holds the whole iteration's batch, as in REINFORCE++ (arXiv:2501.03262), section 3: a scale for each step would
    remove the differences between steps. The variance is Bessel-corrected. `group`: a torch.distributed process group whose
    ranks hold parts of one batch (each entry on one rank only); every rank must call. A single valid entry becomes 0.
    """
    on = mask.bool()
    values = clean(upcast(x), on).double()
    count_and_sum = torch.stack([on.double().sum(), values.sum()])
    if group is not None:
        dist.all_reduce(count_and_sum, group=group)
    count, total = count_and_sum.unbind()
    centred = clean(values - total / count.clamp(min=1), on)
    squares = centred.square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return (centred / (squares / (count - 1).clamp(min=1) + epsilon).sqrt()).to(upcast(x).dtype)
