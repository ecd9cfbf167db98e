"""Correction of the gap between the sampler (engine) and the trainer: importance weights and what bounds them.

Owns the weights w = pi_old / pi_rollout, their bounds, rejection and metrics; knows nothing of the loss they multiply.
Where pi_old is the trainer before the iteration (the proximal policy), w times a loss that is clipped around pi_old is
decoupled PPO, see millrace.core.algorithms.objective.
Nothing here carries a gradient. The weights are right only if the rollout log-probabilities belong to the
distribution that was sampled; millrace.core.config.algorithm.rules refuses other configurations.
"""

from typing import Literal

import torch
from torch import Tensor

from millrace.core.algorithms.aggregate import clean, sample_mean, sample_sum, spread, upcast
from millrace.core.algorithms.kl import kl_estimate
from millrace.core.config.algorithm import Correction

Level = Literal["token", "sequence_product", "sequence_geometric"]
LOG_WEIGHT_BOUND = 20.0


def log_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, lengths: Tensor, *, level: Level
) -> Tensor:
    """log w of each token [N], bounded to +-20; masked tokens 0.

    token: old - rollout. sequence_product: its sum over the sample's unmasked tokens (the exact weight of the sequence).
    sequence_geometric: its mean (length-normalised, biased, of far smaller variance).
    """
    gap = (clean(upcast(old_logprobs), mask) - clean(upcast(rollout_logprobs), mask)).detach()
    if level == "sequence_product":
        gap = clean(spread(sample_sum(gap, mask, lengths), lengths), mask)
    elif level == "sequence_geometric":
        gap = clean(spread(sample_mean(gap, mask, lengths), lengths), mask)
    return gap.clamp(-LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND)


def truncate(weights: Tensor, *, high: float, low: float = 0.0) -> Tensor:
    """min(max(w, low), high): truncated importance sampling (TIS), with an optional floor.

    Ionides (2008), "Truncated importance sampling"; Yao et al. (2025), "Your efficient RL framework secretly brings you off-policy".
    """
    return weights.clamp(low, high)


def mask_outside(weights: Tensor, *, high: float, low: float = 0.0) -> Tensor:
    """w where low <= w <= high, else 0: masked importance sampling (MIS).

    On tokens, with bounds of 0.5 and 5, this is IcePop: Ring-1T (arXiv:2510.18855).
    """
    return torch.where((weights >= low) & (weights <= high), weights, torch.zeros_like(weights))


def reject(weights: Tensor, *, high: float, low: float = 0.0) -> Tensor:
    """1 where low <= w <= high, else 0: rejection without reweighting."""
    return ((weights >= low) & (weights <= high)).to(weights.dtype)


def veto(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, lengths: Tensor, *, lowest: float
) -> Tensor:
    """0 on all tokens of a sample that has any token with w < lowest, else 1 [N]: such a token could hardly have been drawn."""
    gap = log_weights(old_logprobs, rollout_logprobs, mask, lengths, level="token")
    hopeless = (gap.exp() < lowest) & mask.bool()
    count = sample_sum(hopeless.to(gap.dtype), mask, lengths)
    return spread((count == 0).to(gap.dtype), lengths)


def opsm(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    delta: float,
) -> Tensor:
    """0 on tokens with A < 0 of samples whose mean (behaviour - current) log-probability exceeds delta, else 1 [N].

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556). delta: nats a token.
    """
    gap = clean(upcast(behaviour_logprobs), mask) - clean(upcast(logprobs), mask)
    drifted = spread(sample_mean(gap.detach(), mask, lengths) > delta, lengths)
    return (~(drifted & (advantages < 0))).to(gap.dtype)


def too_old(ages: Tensor, mask: Tensor, *, oldest: int) -> Tensor:
    """Bool [N]: unmasked tokens of more than `oldest` published versions. ages [N] as of millrace.core.accounts.staleness.token_ages."""
    return (ages > oldest) & mask.bool()


def correct(log_w: Tensor, correction: Correction) -> Tensor:
    """What multiplies the token loss [N], from log w [N] and the configured kind and bounds."""
    weights, low, high = log_w.exp(), correction.low, correction.high
    if correction.kind == "truncate":
        return truncate(weights, low=low, high=high)
    if correction.kind in ("mask", "icepop"):
        return mask_outside(weights, low=low, high=high)
    if correction.kind == "reject":
        return reject(weights, low=low, high=high)
    return torch.ones_like(weights)


def metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, lengths: Tensor, correction: Correction
) -> dict[str, tuple[Tensor, Tensor]]:
    """Figures of the gap as (sum, weight) pairs over unmasked tokens, exact under any split of the batch.

    importance_mean, importance_second (second moment) and importance_about_one (mean squared distance from 1; std and effective
    sample size follow, see millrace.core.algorithms.objective.derived), importance_out_of_band (share outside [low, high] of the correction), sampler_k3 and
    sampler_k1 (KL of sampler from trainer, nats a token), sampler_gap (mean |old - rollout|).
    """
    on = mask.bool()
    count = on.sum().float()
    log_w = log_weights(old_logprobs, rollout_logprobs, on, lengths, level=correction.level)
    weights = log_w.exp()
    outside = (weights < correction.low) | (weights > correction.high)
    rollout = upcast(rollout_logprobs).detach()
    # tokens were drawn by the sampler, so k = log rollout - log old
    k3 = kl_estimate(rollout, old_logprobs, "k3", mask=on)
    k1 = kl_estimate(rollout, old_logprobs, "k1", mask=on)
    return {
        "importance_mean": (clean(weights, on).sum(), count),
        "importance_second": (clean(weights.square(), on).sum(), count),
        # about 1, where weights lie: their second moment less the squared mean cancels in fp32
        "importance_about_one": (clean((weights - 1).square(), on).sum(), count),
        "importance_out_of_band": ((outside & on).sum().float(), count),
        "sampler_k1": (k1.sum(), count),
        "sampler_k3": (k3.sum(), count),
        "sampler_gap": (k1.abs().sum(), count),
    }


def applied_metrics(factor: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """First and second moment of what multiplies the token loss [N], over all unmasked tokens n, those left out too.

    From them millrace.core.algorithms.objective.derived makes ess = (sum f)^2 / (n sum f^2), Kish's effective sample size
    as a share: 1 if all tokens weigh the same, 1/n if one token has all the weight, 0 if every token is left out.
    """
    on = mask.bool()
    count = on.sum().float()
    kept = clean(factor, on)
    return {"correction_mean": (kept.sum(), count), "correction_second": (kept.square().sum(), count)}
