"""Advantages from rewards: what is known of a sample once its group is scored, and what needs its tokens.

Owns the estimators; knows nothing of losses or of where numbers are stored. Statistics of a group are taken by group id,
never over the batch, in float64. A NaN reward means "not scored": it enters no statistic and its advantage is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.core.algorithms.packed import clean, spread, upcast
from millrace.core.config.algorithm import Algorithm
from millrace.core.errors import DataError
from millrace.core.hooks import load


class _Groups:
    """Rewards [B] by group: which are scored, and each group's count, mean and spread, shown on its samples."""

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        if rewards.shape != group_ids.shape or rewards.dim() != 1:
            raise ValueError(
                f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [B]"
            )
        self.dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
        self.scored = ~torch.isnan(rewards)
        self.rewards = clean(rewards.double(), self.scored)
        _, self.number = torch.unique(group_ids, return_inverse=True)
        self.groups = int(self.number.max()) + 1 if self.number.numel() else 0
        self.count = self.sum(self.scored.double())
        self.mean = self.sum(self.rewards) / self.count.clamp(min=1)
        self.centred = clean(self.rewards - self.mean, self.scored & self._varied())

    def sum(self, x: Tensor) -> Tensor:
        """Sum of x over the group of each sample [B]."""
        return x.new_zeros(self.groups).index_add(0, self.number, x)[self.number]

    def _varied(self) -> Tensor:
        """Whether the group's scored rewards differ at all; equal ones must give exact zeros whatever the rounding."""
        far = torch.full((self.groups,), torch.inf, dtype=torch.float64, device=self.rewards.device)
        number, values = self.number[self.scored], self.rewards[self.scored]
        low = far.scatter_reduce(0, number, values, "amin")
        high = (-far).scatter_reduce(0, number, values, "amax")
        return (high > low)[self.number]

    def std(self) -> Tensor:
        """Bessel-corrected standard deviation of each sample's group [B]; 0 for fewer than two scored samples."""
        return (self.sum(self.centred.square()) / (self.count - 1).clamp(min=1)).sqrt()

    def done(self, advantages: Tensor) -> Tensor:
        """Zeros for what was not scored, in the type of the rewards."""
        return clean(advantages, self.scored).to(self.dtype)


def group_relative(
    rewards: Tensor, group_ids: Tensor, *, divide_by_std: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """(R - mean of its group) / (std of its group + epsilon) [B]; without divide_by_std the centred reward alone.

    GRPO (arXiv:2402.03300), section 4.1.2; without the std Dr. GRPO (arXiv:2503.20783). The std is Bessel-corrected,
    epsilon is added to it. Equal rewards, and groups with one scored sample, give exact zeros.
    Errors: ValueError unless rewards and group_ids are both [B].
    """
    groups = _Groups(rewards, group_ids)
    scale = groups.std() + epsilon if divide_by_std else torch.ones_like(groups.mean)
    return groups.done(groups.centred / scale)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R - mean of the others of its group = n / (n - 1) * (R - mean) [B]. RLOO (arXiv:2402.14740), eq. 8.

    A group with one scored sample has no others: 0.
    """
    groups = _Groups(rewards, group_ids)
    return groups.done(groups.centred * groups.count / (groups.count - 1).clamp(min=1))


def max_rl(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(R - mean) / mean of its group [B]: rare successes weigh more, as maximum likelihood has it. MaxRL (arXiv:2602.02710).

    A group whose mean is 0 gives zeros. Errors: DataError for a negative reward, with which the formula changes its sign.
    """
    groups = _Groups(rewards, group_ids)
    if bool((groups.rewards < 0).any()):
        raise DataError(
            "advantage max_rl needs rewards that are not negative; shift them, or use group_relative"
        )
    return groups.done(
        groups.centred / torch.where(groups.mean > 0, groups.mean, torch.ones_like(groups.mean))
    )


def broadcast(per_sample: Tensor, lengths: Tensor) -> Tensor:
    """A sample's advantage [B] on each of its response tokens [N]."""
    return spread(per_sample, lengths)


def token_rewards(
    rewards: Tensor, kl: Tensor | None, mask: Tensor, lengths: Tensor, *, kl_coef: float
) -> Tensor:
    """Reward of each token [N]: -kl_coef * kl where the mask is 1, and the sample's reward on its last unmasked token.

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
    column = _tail_count(on, lengths)[on] - 1  # 0 is the last token, so that time runs against the columns
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

    The variance is Bessel-corrected. `group`: a torch.distributed process group whose ranks hold parts of one batch
    (each entry on one rank only); every rank must call. A single valid entry becomes 0.
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


def sample_advantages(rewards: Tensor, group_ids: Tensor, config: Algorithm) -> Tensor | None:
    """Advantage of each sample [B] by the configured estimator, or None where it needs tokens (gae, reinforce_plus_plus).

    rewards [B] (NaN: not scored), group_ids [B]. For reinforce_plus_plus_baseline this is the centred reward, which
    `estimate.token_advantages` completes.
    """
    if config.advantage_function:
        given = load(config.advantage_function, "algorithm.advantage_function")(rewards, group_ids)
        return clean(given, ~torch.isnan(rewards))
    if config.advantage == "group_relative":
        return group_relative(rewards, group_ids, divide_by_std=config.divide_by_std, epsilon=config.epsilon)
    if config.advantage == "leave_one_out":
        return leave_one_out(rewards, group_ids)
    if config.advantage == "max_rl":
        return max_rl(rewards, group_ids)
    if config.advantage == "reinforce_plus_plus_baseline":
        return group_relative(rewards, group_ids, divide_by_std=False)
    return torch.zeros_like(rewards) if config.advantage == "none" else None
