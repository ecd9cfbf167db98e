"""Estimators of the KL divergence between the policy and a reference, token by token.

Owns the formulas; does not know whether the KL goes to the loss or the reward. With d = log pi(token) - log ref(token),
tokens drawn from pi:

    k1 = d;  k2 = d^2 / 2;  k3 = exp(-d) - 1 + d;  low_var = k3 clamped to [-10, 10];  abs = |d|

Source: Schulman, "Approximating KL divergence" (2020); low_var as in slime and verl.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from millrace.core.algorithms.aggregate import clean, upcast
from millrace.core.config.algorithm import Algorithm

Kind = Literal["k1", "k2", "k3", "low_var", "abs"]
LOW_VAR_BOUND = 10.0
EXPONENT_BOUND = 60.0  # exp(60) still squares to a finite float32 gradient


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: Kind,
    *,
    mask: Tensor | None = None,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """KL of each token [N], nats; masked tokens are exactly 0 in value and gradient even if an input is NaN.

    logprobs carries the gradient; ref_logprobs does not.
    old_logprobs: log-probs of the policy that drew the tokens. When given, the estimate is multiplied by
    pi / pi_old with its gradient, which makes both value and gradient unbiased off-policy (DeepSeek-V3.2,
    arXiv:2512.02556, "unbiased KL estimate").
    Errors: ValueError for an unknown kind.
    """
    new, ref = upcast(logprobs), upcast(ref_logprobs).detach()
    if mask is not None:
        new, ref = clean(new, mask), clean(ref, mask)
    d = new - ref
    if kind == "k1":
        value = d
    elif kind == "k2":
        value = 0.5 * d.square()
    elif kind in ("k3", "low_var"):
        value = torch.exp((-d).clamp(max=EXPONENT_BOUND)) - 1 + d
        if kind == "low_var":
            value = value.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    elif kind == "abs":
        value = d.abs()
    else:
        raise ValueError(f"unknown KL estimator {kind!r}: use k1, k2, k3, low_var or abs")
    if old_logprobs is not None:
        old = upcast(old_logprobs).detach()
        old = old if mask is None else clean(old, mask)
        value = value * torch.exp((new - old).clamp(max=20.0))
    return value if mask is None else clean(value, mask)


ERROR_BOUND = 0.2


def adaptive_kl(value: float, *, target: float, horizon: int, current: float, n: int) -> float:
    """The next KL coefficient: value * (1 + clip(current / target - 1, -0.2, 0.2) * n / horizon).

    value: the coefficient. current: the measured KL, target: the wanted KL (nats, same unit). n: samples since the last
    update. Ziegler et al. (arXiv:1909.08593), section 2.2.
    """
    error = min(max(current / target - 1, -ERROR_BOUND), ERROR_BOUND)
    return value * (1 + error * n / horizon)


class KLController:
    """The current KL coefficient, `value`: it changes only if algorithm.kl_target is set."""

    def __init__(self, config: Algorithm) -> None:
        self._target, self._horizon = config.kl_target, config.kl_horizon
        self.value = self._configured = config.kl_coef

    def update(self, current: float, samples: int) -> float:
        """Update after a step over `samples` samples whose mean KL was `current` (nats a token); returns the coefficient."""
        if self._target is not None:
            self.value = adaptive_kl(
                self.value, target=self._target, horizon=self._horizon, current=current, n=samples
            )
        return self.value

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"kl_coef": self.value, "configured": self._configured}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's `state`, unless the configured coefficient was changed since.

        A state without a coefficient leaves the configured one.
        """
        began_alike = state.get("configured", self._configured) == self._configured
        self.value = self._configured
        if self._target is not None and began_alike:
            self.value = state.get("kl_coef", self.value)
