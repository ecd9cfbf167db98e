"""Advantages of tokens for one optimizer step: what the configured estimator makes of rewards, KL, values and a teacher.

Owns the composition of the estimators in `advantages`; knows nothing of the model. Called once a step with all samples of
a rank (not pack by pack), because whitening looks at the whole global batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from millrace.core.algorithms import advantages
from millrace.core.algorithms.kl import kl_estimate
from millrace.core.algorithms.losses import distillation_term
from millrace.core.algorithms.packed import clean, upcast
from millrace.core.config.algorithm import Algorithm
from millrace.core.errors import TrainerError


class TokenAdvantages(NamedTuple):
    """Advantages [N], and returns [N] where there is a critic to fit them."""

    advantages: Tensor
    returns: Tensor | None


def token_advantages(
    config: Algorithm,
    *,
    rewards: Tensor,
    sample_advantages: Tensor | None,
    mask: Tensor,
    lengths: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    kl_coef: float | None = None,
    group: Any = None,
) -> TokenAdvantages:
    """Advantages of a rank's samples under the configuration; no gradient.

    rewards [B]: what the token-level estimators start from (shaped rewards, see schedule.shape_rewards).
    sample_advantages [B]: of advantages.sample_advantages over the whole group, None where it gave None.
    logprobs [N]: the old policy's. kl_coef: the controller's; the configured one when not given.
    group: data-parallel process group for whitening; every rank of it must call.
    Whitening comes before the teacher's term, whose coefficient so keeps its scale.
    Errors: TrainerError when a part that the configuration needs is missing.
    """
    coef = config.kl_coef if kl_coef is None else kl_coef
    kl = None
    if config.kl_placement == "reward" and coef > 0:
        kl = kl_estimate(
            logprobs.detach(), _needed(ref_logprobs, "reference log-probabilities"), config.kl_kind, mask=mask
        )
    returns = None
    if config.advantage_function is None and config.advantage == "gae":
        per_token = advantages.token_rewards(rewards, kl, mask, lengths, kl_coef=coef)
        found, returns = advantages.gae(
            per_token,
            _needed(values, "values of the critic"),
            mask,
            lengths,
            gamma=config.gamma,
            lam=config.lam,
        )
    elif config.advantage_function is None and config.advantage == "reinforce_plus_plus":
        zero = upcast(logprobs.detach()).new_zeros(logprobs.shape) if kl is None else kl
        found = advantages.reinforce_plus_plus(rewards, zero, mask, lengths, gamma=config.gamma, kl_coef=coef)
    elif config.advantage_function is None and config.advantage == "reinforce_plus_plus_baseline":
        centred = _needed(sample_advantages, "advantages of samples")
        found = advantages.reinforce_plus_plus_baseline(centred, kl, mask, lengths, kl_coef=coef)
    else:
        found = advantages.broadcast(upcast(_needed(sample_advantages, "advantages of samples")), lengths)
    if config.whiten:
        found = advantages.whiten(found, mask, group)
    if config.distillation_coef > 0:
        teacher = _needed(teacher_logprobs, "log-probabilities of the teacher")
        found = found + clean(distillation_term(logprobs, teacher, config.distillation_coef), mask)
    return TokenAdvantages(clean(found, mask), returns)


def _needed(x: Tensor | None, what: str) -> Tensor:
    if x is None:
        raise TrainerError(f"the configured advantage needs {what}, which the step does not have")
    return x
