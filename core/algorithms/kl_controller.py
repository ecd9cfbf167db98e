"""The KL coefficient over a run: fixed, or steered towards a target.

Owns the rule and the state that a checkpoint must hold (`state`, `restore`: plain numbers); knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.core.config.algorithm import Algorithm

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
