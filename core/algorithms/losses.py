"""Losses, token by token, on the packed layout.

Owns the formulas of policy, value and supervised losses; knows nothing of aggregation, KL or configuration. All take
log-probabilities in any float type and work in fp32 (float64 stays); `logprobs` carries the gradient, all else is constant.
Notation: r = exp(logprob - old logprob), A the advantage, sg() stops the gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from millrace.core.algorithms.aggregate import clean, sample_mean, spread, upcast

LOG_RATIO_BOUND = 20.0
# below this probability of all tokens beside the k, fp32 has no digits left
LEAST_REST = 1e-6


class PolicyLoss(NamedTuple):
    """A policy loss and what happened to it, each [N]."""

    loss: Tensor  # per token, to be minimised
    ratio: Tensor  # the ratio used, detached
    clipped_low: Tensor  # bool: the lower bound removed the gradient (for cispo: bounded the weight)
    clipped_high: Tensor  # bool: the same for the upper bound, dual clip included


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log r [N], bounded to +-20 against overflow."""
    return (upcast(logprobs) - upcast(old_logprobs).detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); at most -dual_clip A if A < 0.

    PPO (arXiv:1707.06347), eq. 7; unequal bounds from DAPO (arXiv:2503.14476), eq. 10; dual clip from
    arXiv:1912.09729, eq. 5. Errors: ValueError if dual_clip is not above 1.
    """
    ratio = torch.exp(log_ratio(logprobs, old_logprobs))
    return _clip(ratio, upcast(advantages), clip_low, clip_high, dual_clip)


def _clip(ratio: Tensor, a: Tensor, low: float, high: float, dual_clip: float | None) -> PolicyLoss:
    a = a.detach()
    loss = torch.maximum(-ratio * a, -ratio.clamp(1 - low, 1 + high) * a)
    fixed = ratio.detach()
    clipped_low = (fixed < 1 - low) & (a < 0)
    clipped_high = (fixed > 1 + high) & (a > 0)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
        loss = torch.where(a < 0, torch.minimum(loss, -dual_clip * a), loss)
        clipped_high = clipped_high | ((fixed > dual_clip) & (a < 0))
    return PolicyLoss(loss, fixed, clipped_low, clipped_high)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    lengths: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The clipped loss with one ratio a sequence: s = exp(mean over its unmasked tokens of log r), on all its tokens.

    GSPO (arXiv:2507.18071), eqs. 5-7. The gradient of s reaches every unmasked token of the sequence, so
    the sample must be whole in the batch; `sequence_mean` aggregation gives the paper's objective.
    """
    per_token = log_ratio(clean(logprobs, mask), clean(old_logprobs, mask))
    ratio = torch.exp(spread(sample_mean(per_token, mask, lengths), lengths))
    return _clip(ratio, upcast(advantages), clip_low, clip_high, None)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob: the weight is bounded, no token loses its gradient.

    CISPO, MiniMax-M1 (arXiv:2506.13585), eqs. 4-5; clip_low = 1 leaves the lower side open, as the paper does.
    """
    ratio = torch.exp(log_ratio(logprobs.detach(), old_logprobs))
    low, high = 1 - clip_low, 1 + clip_high
    loss = -ratio.clamp(low, high) * upcast(advantages).detach() * upcast(logprobs)
    return PolicyLoss(loss, ratio, ratio < low, ratio > high)


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> PolicyLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with tau by the sign of A: a soft gate instead of the clip.

    SAPO (arXiv:2511.20347). Its slope at r = 1 is that of r A and falls off smoothly on both sides. Nothing is clipped.
    """
    ratio = torch.exp(log_ratio(logprobs, old_logprobs))
    a = upcast(advantages).detach()
    tau = torch.where(a > 0, temperature_positive, temperature_negative).to(ratio.dtype)
    loss = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1)) * a
    never = torch.zeros_like(a, dtype=torch.bool)
    return PolicyLoss(loss, ratio.detach(), never, never)


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A logprob [N]. Williams (1992); RLOO (arXiv:2402.14740) uses it with a leave-one-out baseline."""
    return -upcast(advantages).detach() * upcast(logprobs)


def sft_loss(logprobs: Tensor) -> Tensor:
    """-logprob of the reference answer's tokens [N]."""
    return -upcast(logprobs)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None) -> Tensor:
    """Half the squared error of the critic [N]; with `clip` the larger of it and that of values kept within
    old_values +- clip (PPO's value clipping, as in OpenAI baselines). `values` carries the gradient."""
    v, target = upcast(values), upcast(returns).detach()
    error = (v - target).square()
    if clip is not None:
        old = upcast(old_values).detach()
        bounded = old + (v - old).clamp(-clip, clip)
        error = torch.maximum(error, (bounded - target).square())
    return 0.5 * error


def distillation_term(logprobs: Tensor, teacher_logprobs: Tensor, coef: float) -> Tensor:
    """What on-policy distillation adds to the advantage [N]: -coef (log pi - log teacher), no gradient.

    The policy gradient with it descends the reverse KL from student to teacher on the student's own samples
    (GKD, arXiv:2306.13649; Thinking Machines Lab, "On-Policy Distillation", 2025).
    """
    return -coef * (upcast(logprobs) - upcast(teacher_logprobs)).detach()


def top_k_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(pi || teacher) [N] over k tokens and all the rest as one outcome, in nats; the gradient flows through `logprobs`.

    Both [N, k], of the k tokens that the teacher finds likeliest. As one outcome stands for the rest, this is at most the
    KL over the whole vocabulary, and equal to it if the rest has the same shape under both.
    The divergence of GKD (arXiv:2306.13649) that is descended by its gradient, where `distillation_term` samples it.
    """
    ours, theirs = upcast(logprobs), upcast(teacher_logprobs).detach()
    inside = (ours.exp() * (ours - theirs)).sum(-1)
    rest, their_rest = (1 - x.exp().sum(-1) for x in (ours, theirs))
    rest, their_rest = rest.clamp(min=LEAST_REST), their_rest.clamp(min=LEAST_REST)
    return inside + rest * (rest.log() - their_rest.log())
