"""What changes from step to step or shapes rewards: KL controllers, clip schedules, length penalties.

Owns the rules and the state that must survive a restart (`state` / `restore`, plain numbers for the checkpoint); knows
nothing of losses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from millrace.core.algorithms.packed import upcast
from millrace.core.config.algorithm import Algorithm
from millrace.core.hooks import load

ERROR_BOUND = 0.2


def adaptive_kl(value: float, *, target: float, horizon: int, current: float, n: int) -> float:
    """The next KL coefficient: value * (1 + clip(current / target - 1, -0.2, 0.2) * n / horizon).

    value: the coefficient. current: KL measured, target: KL wanted (nats, same unit). n: samples since the last update.
    Ziegler et al. (arXiv:1909.08593), section 2.2.
    """
    error = min(max(current / target - 1, -ERROR_BOUND), ERROR_BOUND)
    return value * (1 + error * n / horizon)


class KLController:
    """The KL coefficient over a run: fixed, or adaptive when algorithm.kl_target is given."""

    def __init__(self, config: Algorithm) -> None:
        self._target, self._horizon = config.kl_target, config.kl_horizon
        self.value = config.kl_coef

    def update(self, current: float, samples: int) -> float:
        """Take in the KL of a step over `samples` samples (nats a token); the coefficient from now on."""
        if self._target is not None:
            self.value = adaptive_kl(
                self.value, target=self._target, horizon=self._horizon, current=current, n=samples
            )
        return self.value

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"kl_coef": self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint's `state`; one without it leaves the configured value."""
        if self._target is not None:
            self.value = state.get("kl_coef", self.value)


def linear(first: float, last: float, *, step: int, steps: int) -> float:
    """A value that moves from `first` at step 0 to `last` at step `steps` and stays there. For clip ranges and the like."""
    if steps <= 0:
        return last
    return first + (last - first) * min(max(step, 0), steps) / steps


def overlong_penalty(lengths: Tensor, *, budget: int, buffer: int, factor: float = 1.0) -> Tensor:
    """What is added to the reward of each sample [B]: 0 up to budget - buffer tokens, then linearly to -factor at the budget.

    lengths [B], budget and buffer in tokens. DAPO (arXiv:2503.14476), eq. 13. Errors: ValueError unless 0 < buffer <= budget.
    """
    if not 0 < buffer <= budget:
        raise ValueError(f"buffer must lie in 1..{budget} (the budget), not {buffer}")
    excess = (upcast(lengths) - (budget - buffer)) / buffer
    return -factor * excess.clamp(0, 1)


def length_penalty(lengths: Tensor, rewards: Tensor, *, factor: float) -> Tensor:
    """What is added to each reward [B] of one group: factor * (0.5 - (len - min) / (max - min)), for the wrong at most 0.

    Kimi k1.5 (arXiv:2501.12599), section 2.3.3; wrong means a reward of 0 or less. Equal lengths give 0.
    """
    size = upcast(lengths)
    span = size.max() - size.min()
    if bool(span == 0):
        return torch.zeros_like(size)
    bonus = factor * (0.5 - (size - size.min()) / span)
    return torch.where(rewards > 0, bonus, bonus.clamp(max=0))


def shape_rewards(
    rewards: Tensor, lengths: Tensor, truncated: Tensor, config: Algorithm, *, budget: int
) -> Tensor:
    """Rewards [B] that advantages are computed from: the stored ones with the configured shaping.

    lengths [B] in tokens, truncated [B] bool, budget: rollout.sampling.max_new_tokens. NaN (not scored) stays NaN.
    """
    shaped = rewards
    if config.overlong is not None:
        buffer = config.overlong.buffer_tokens or max(1, budget // 5)
        shaped = shaped + overlong_penalty(
            lengths, budget=budget, buffer=buffer, factor=config.overlong.factor
        ).to(shaped.dtype)
    if config.shaping_function:
        shaped = load(config.shaping_function, "algorithm.shaping_function")(shaped, lengths, truncated)
    return shaped
