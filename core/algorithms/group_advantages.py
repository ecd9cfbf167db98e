"""Advantages of samples from the rewards of their groups: one number a sample, known once its group is scored.

Owns the estimators that compare the samples of one prompt, and the built-in penalties that shape a reward before; knows nothing
of tokens, losses or of where numbers are stored. Statistics are taken by group id, never over the batch, in float64. A NaN reward
means "not scored": it enters no statistic and its advantage is 0.
"""

import torch
from torch import Tensor

from millrace.core.algorithms.aggregate import clean, upcast
from millrace.core.config.algorithm import Algorithm, Overlong
from millrace.core.errors import DataError


class _Groups:
    """Rewards [B] by group: which are scored, and the count and mean of each sample's group [B]."""

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
        """Whether the group's scored rewards differ at all: equal rewards must give exact zeros despite rounding."""
        largest = torch.full((self.groups,), torch.inf, dtype=torch.float64, device=self.rewards.device)
        number, values = self.number[self.scored], self.rewards[self.scored]
        low = largest.scatter_reduce(0, number, values, "amin")
        high = (-largest).scatter_reduce(0, number, values, "amax")
        return (high > low)[self.number]

    def std(self) -> Tensor:
        """Bessel-corrected standard deviation of each sample's group [B]; 0 for fewer than two scored samples."""
        return (self.sum(self.centred.square()) / (self.count - 1).clamp(min=1)).sqrt()

    def advantages(self, values: Tensor) -> Tensor:
        """The values in the type of the rewards, with 0 for samples that were not scored."""
        return clean(values, self.scored).to(self.dtype)


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
    return groups.advantages(groups.centred / scale)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R - mean of the others of its group = n / (n - 1) * (R - mean) [B]. RLOO (arXiv:2402.14740), eq. 8.

    A group with one scored sample has no others: 0.
    """
    groups = _Groups(rewards, group_ids)
    return groups.advantages(groups.centred * groups.count / (groups.count - 1).clamp(min=1))


def max_rl(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(R - mean) / mean of its group [B]: rare successes weigh more, as in maximum likelihood. MaxRL (arXiv:2602.02710).

    A group whose mean is 0 gives zeros. Errors: DataError for a negative reward, with which the formula changes its sign.
    """
    groups = _Groups(rewards, group_ids)
    if bool((groups.rewards < 0).any()):
        raise DataError(
            "advantage max_rl needs rewards that are not negative; shift them, or use group_relative"
        )
    return groups.advantages(
        groups.centred / torch.where(groups.mean > 0, groups.mean, torch.ones_like(groups.mean))
    )


def group_advantages(rewards: Tensor, group_ids: Tensor, config: Algorithm) -> Tensor | None:
    """Advantage of each sample [B] by the configured estimator, or None if it needs tokens (gae, reinforce_plus_plus).

    rewards [B] (NaN: not scored), group_ids [B]. For reinforce_plus_plus_baseline this is the centred reward, which
    `credit.token_credit` completes.
    """
    estimator = config.advantage
    if estimator.kind == "group_relative":
        return group_relative(
            rewards, group_ids, divide_by_std=estimator.divide_by_std, epsilon=estimator.epsilon
        )
    if estimator.kind == "leave_one_out":
        return leave_one_out(rewards, group_ids)
    if estimator.kind == "max_rl":
        return max_rl(rewards, group_ids)
    if estimator.kind == "reinforce_plus_plus_baseline":
        return group_relative(rewards, group_ids, divide_by_std=False)
    return torch.zeros_like(rewards) if estimator.kind == "none" else None


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
