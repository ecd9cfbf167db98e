"""Credit: what each sample, and then each of its tokens, is worth to a training step.

The only module that shapes rewards and computes advantages; it calls the formulas of the modules beside it. Two halves:

- `sample_credit` works on whole groups, once an iteration. The filter has a worker process call it, so that neither torch
  nor functions of the user's run in the driver, and stores both results in batch.parquet.
- `token_credit` works on response tokens, once an optimizer step. Each trainer rank calls it with what was stored.

torch is imported when a function is called: the driver imports this module to name `sample_credit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from millrace.core.config.algorithm import Algorithm
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.errors import ConfigError, TrainerError
from millrace.core.hooks.loading import call_function

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ScoredSamples:
    """B samples as credit sees them: plain lists, which travel to the worker process."""

    rewards: Sequence[float]  # NaN: not scored
    # samples of one group are compared: the samples of one prompt, or its branches of one name
    group_ids: Sequence[int]
    lengths: Sequence[int]  # response lengths, in tokens
    truncated: Sequence[bool]
    # samples that count once together, as the branches of a rollout do; None: each counts for itself
    units: Sequence[int] | None = None


class SampleCredit(NamedTuple):
    """Shaped reward of each sample [B], and its advantage [B] unless the estimator needs tokens."""

    shaped_rewards: list[float]
    advantages: list[float] | None


class TokenCredit(NamedTuple):
    """Advantage of each token [N], and its return [N] if a critic is fitted to it."""

    advantages: Tensor
    returns: Tensor | None


def load_libraries() -> None:
    """Import what `sample_credit` needs: the first thing that its worker process does, while samples are generated."""
    from millrace.core.algorithms import group_advantages  # noqa: F401


def sample_credit(samples: ScoredSamples, config: Algorithm, budget: int) -> SampleCredit:
    """Shaped rewards and advantages of whole groups, in float64. budget: longest response, tokens.

    A NaN reward (not scored) stays NaN under the built-in shaping and has advantage 0.
    Branches of one name in a rollout share the mean of their rewards, and its advantage.
    Errors: ConfigError when a function of the user's cannot be loaded, raises, or does not return one finite number per scored sample;
    DataError for negative rewards under max_rl.
    """
    import torch

    from millrace.core.algorithms.aggregate import clean
    from millrace.core.algorithms.group_advantages import group_advantages

    own = _shaped(samples, config, budget)
    count = len(samples.rewards)
    units = torch.tensor(range(count) if samples.units is None else samples.units, dtype=torch.long)
    shaped, group_ids = _by_unit(own, torch.tensor(samples.group_ids), units)
    if config.advantage.kind == "function":
        given = _call_user(config.advantage, "algorithm.advantage", shaped, group_ids)
        advantages: Tensor | None = clean(given, ~torch.isnan(shaped))
    else:
        advantages = group_advantages(shaped, group_ids, config)
    return SampleCredit(own.tolist(), None if advantages is None else advantages[units].tolist())


def _by_unit(rewards: Tensor, group_ids: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    """Reward and group of each unit [U], in the order of their numbers: the mean over its samples [B], as units [B] says."""
    made = int(units.max()) + 1 if units.numel() else 0
    count = rewards.new_zeros(made).index_add(0, units, rewards.new_ones(len(rewards)))
    return (
        rewards.new_zeros(made).index_add(0, units, rewards) / count,
        group_ids.new_zeros(made).index_copy(0, units, group_ids),
    )


def stored_or_shaped(
    stored: Sequence[float | None], samples: ScoredSamples, config: Algorithm, budget: int
) -> list[float]:
    """Shaped rewards of a stored batch. Batches written before the column `shaped_reward` existed are shaped again."""
    known = [reward for reward in stored if reward is not None]
    if len(known) == len(stored):
        return known
    shaped: list[float] = _shaped(samples, config, budget).tolist()
    return shaped


def token_credit(
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
) -> TokenCredit:
    """Advantages of a rank's tokens under the configuration; no gradient.

    Called with all samples of the rank, not pack by pack: the samples of a step, or of the iteration if `config.whiten`
    puts them on one scale.
    rewards [B]: shaped. sample_advantages [B]: from `sample_credit`, None if it gave none.
    logprobs [N]: of the old policy. kl_coef: the controller's; the configured one when not given.
    group: data-parallel process group for whitening; every rank of it must call.
    Whitening comes before the teacher's term, so that this keeps the scale of its coefficient.
    Errors: TrainerError when an input that the configuration needs is missing.
    """
    from millrace.core.algorithms import token_advantages as estimators
    from millrace.core.algorithms.aggregate import clean, upcast
    from millrace.core.algorithms.kl import kl_estimate
    from millrace.core.algorithms.losses import distillation_term

    coef = config.kl_coef if kl_coef is None else kl_coef
    kl, returns = None, None
    if config.kl_placement == "reward" and coef > 0:
        ref = _needed(ref_logprobs, "reference log-probabilities")
        kl = kl_estimate(logprobs.detach(), ref, config.kl_kind, mask=mask)
    estimator = config.advantage
    if estimator.kind == "gae":
        per_token = estimators.token_rewards(rewards, kl, mask, lengths, kl_coef=coef)
        old_values = _needed(values, "values of the critic")
        advantages, returns = estimators.gae(
            per_token, old_values, mask, lengths, gamma=estimator.gamma, lam=estimator.lam
        )
    elif estimator.kind == "reinforce_plus_plus":
        zero = upcast(logprobs.detach()).new_zeros(logprobs.shape)
        advantages = estimators.reinforce_plus_plus(
            rewards, zero if kl is None else kl, mask, lengths, gamma=estimator.gamma, kl_coef=coef
        )
    elif estimator.kind == "reinforce_plus_plus_baseline":
        centred = _needed(sample_advantages, "advantages of samples")
        advantages = estimators.reinforce_plus_plus_baseline(centred, kl, mask, lengths, kl_coef=coef)
    else:
        per_sample = _needed(sample_advantages, "advantages of samples")
        advantages = estimators.broadcast(upcast(per_sample), lengths)
    if config.whiten:
        advantages = estimators.whiten(advantages, mask, group)
    if config.distils_in_advantage:
        teacher = _needed(teacher_logprobs, "log-probabilities of the teacher")
        advantages = advantages + clean(distillation_term(logprobs, teacher, config.distillation_coef), mask)
    return TokenCredit(clean(advantages, mask), returns)


def _shaped(samples: ScoredSamples, config: Algorithm, budget: int) -> Tensor:
    """Rewards [B] that advantages are computed from: with the penalty of algorithm.overlong, then the user's function."""
    import torch

    from millrace.core.algorithms.group_advantages import add_overlong_penalty

    shaped = torch.tensor(samples.rewards, dtype=torch.float64)
    lengths, truncated = torch.tensor(samples.lengths), torch.tensor(samples.truncated)
    if config.overlong is not None:
        shaped = add_overlong_penalty(shaped, lengths, config.overlong, budget=budget)
    if config.shaping is not None:
        shaped = _call_user(config.shaping, "algorithm.shaping", shaped, lengths, truncated)
    return shaped


def _call_user(function: UserFunction, field: str, *inputs: Tensor) -> Tensor:
    """The user function's result [B]: one number per sample, finite if the sample's reward is finite."""
    import torch

    wanted = tuple(inputs[0].shape)
    result = call_function(function, field, *(tensor.clone() for tensor in inputs))
    if not isinstance(result, torch.Tensor) or tuple(result.shape) != wanted:
        shape = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise ConfigError(
            f"it returned {shape}",
            where=f"{field}.function = {function.function}",
            remedy=f"return a tensor of shape {wanted}, one number per sample",
        )
    result = result.detach()
    wrong = (~torch.isfinite(result) & ~torch.isnan(inputs[0])).nonzero().flatten().tolist()
    if wrong:
        raise ConfigError(
            f"it returned {float(result[wrong[0]])} for sample {wrong[0]} of {len(result)}, whose reward is {float(inputs[0][wrong[0]]):g}",
            where=f"{field}.function = {function.function}",
            remedy="return a finite number for every sample that was scored",
        )
    return result


def _needed(x: Tensor | None, what: str) -> Tensor:
    if x is None:
        raise TrainerError(f"the configured advantage needs {what}, which the step does not have")
    return x
