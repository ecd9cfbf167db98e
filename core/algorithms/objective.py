"""The training objective of one pack: policy loss, correction, KL and entropy, as the configuration composes them.

Owns the composition and its metrics; knows nothing of the model, of packs to come or of ranks. Loss and metrics are sums
over the pack, so that sums over packs and data-parallel ranks are exact for the global batch.

Tokens of older policies are trained by decoupled PPO (AReaL, arXiv:2505.24298, section 5.2; Hilton et al.,
arXiv:2110.00641), with a clip around the policy before the iteration and a weight that leads to it from the policy that
made the token:

    loss_t = c(pi_prox / pi_behave) max(-u_t A_t, -clip(u_t, 1 - low, 1 + high) A_t),   u_t = pi / pi_prox

pi_prox: `old_logprobs`, pi_behave: `rollout_logprobs`, of the version that made the token. c is the configured correction,
the identity in the paper; it carries no gradient.
"""

from collections.abc import Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from millrace.core.algorithms import importance, losses
from millrace.core.algorithms.aggregate import (
    clean,
    denominator,
    reduce,
    sample_weights,
    undivided_weights,
    upcast,
)
from millrace.core.algorithms.kl import kl_estimate
from millrace.core.config.algorithm import Algorithm
from millrace.core.contracts.token_batch import TokenBatch
from millrace.core.errors import TrainerError
from millrace.core.hooks.loading import call_function, load_function

Metrics = dict[str, tuple[Tensor, Tensor]]


class Objective:
    """Loss and metrics of a pack under one `algorithm` section. Stateless but for `kl_coef`, which a controller may move."""

    def __init__(self, config: Algorithm) -> None:
        self.config = config
        self.kl_coef = config.kl_coef
        if config.loss.kind == "function":
            # a wrong path is an error here, not at the first pack
            load_function(config.loss, "algorithm.loss")

    @property
    def supervised(self) -> bool:
        """Whether the loss is the plain likelihood of the responses."""
        return self.config.supervised

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy bonus, so that `entropy` must carry a gradient."""
        return self.config.entropy_coef > 0 and not self.supervised

    @property
    def needs_ref(self) -> bool:
        """Whether reference log-probabilities are needed, in the loss or in the reward."""
        return self.config.kl_coef > 0 and not self.supervised

    @property
    def teacher_top_k(self) -> int:
        """Tokens of each position whose log-probabilities under policy and teacher are compared; 0: none are."""
        return 0 if self.supervised else self.config.teacher_top_k

    @property
    def needs_old(self) -> bool:
        """Whether a ratio against the trainer's own earlier log-probabilities is taken."""
        return self.config.loss.kind not in ("sft", "reinforce") and self.config.old_logprobs != "rollout"

    @property
    def needs_recompute(self) -> bool:
        """Whether old log-probabilities need a forward pass even with one step an iteration (old_logprobs=recompute)."""
        return self.needs_old and self.config.old_logprobs == "recompute"

    @property
    def ratio_to_rollout(self) -> bool:
        """Whether the ratio is taken against the engine's log-probabilities."""
        return self.config.loss.kind not in ("sft", "reinforce") and self.config.old_logprobs == "rollout"

    def sample_weights(self, counts: Tensor, longest: int, rollouts: Tensor | None = None) -> Tensor:
        """Weight [B] of each sample's tokens from `counts` [B], the unmasked tokens of every sample of the global batch.

        longest: tokens of the longest response. rollouts [B]: which rollout each sample is of; None: each is one."""
        return sample_weights(counts, self.config, max_length=longest, rollouts=rollouts)

    def undivided_weights(self, counts: Tensor, longest: int, rollouts: Tensor) -> Tensor:
        """Weights [B] of some samples of the global batch, not yet divided by its `denominator`."""
        return undivided_weights(counts, self.config, max_length=longest, rollouts=rollouts)

    def denominator(self, counts: Tensor, rollouts: Tensor) -> float:
        """The divisor of the loss of the global batch, if its passes used undivided weights."""
        return denominator(counts, self.config, rollouts)

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """Loss (scalar, to be summed over packs and ranks) and metrics as (weighted sum, weight) pairs.

        Errors: TrainerError when something the configuration needs (reference, entropy) is not in the batch.
        """
        batch = _cleaned(batch)
        count = batch.mask.sum().float()
        total_weight = batch.weights.sum()
        metrics: Metrics = {}
        batch = self._without_too_old(batch, metrics)
        if self.supervised:
            pg_loss = self._reduce(losses.sft_loss(batch.logprobs), batch)
        elif self.config.loss.kind == "function":
            per_token, extra = call_function(self.config.loss, "algorithm.loss", batch)
            metrics.update(extra)
            pg_loss = self._reduce(per_token, batch)
        else:
            policy = self._policy(batch)
            pg_loss = self._reduce(policy.loss * self._correction(batch, metrics), batch)
            metrics |= _policy_metrics(batch, policy)
        loss = pg_loss
        if batch.entropy is not None:
            metrics["entropy"] = (batch.entropy.detach().sum(), count)
        if not self.supervised:
            loss = loss + self._regularisation(batch, metrics)
        metrics["pg_loss"] = (pg_loss.detach(), total_weight)
        metrics["loss"] = (loss.detach(), total_weight)
        return loss, metrics

    def _reduce(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        return reduce(per_token, batch.mask, batch.weights)

    def _without_too_old(self, batch: TokenBatch, metrics: Metrics) -> TokenBatch:
        """The batch with weight 0 on tokens above correction.max_token_age: they enter no term of the loss."""
        oldest = self.config.correction.max_token_age
        if oldest is None:
            return batch
        ages = torch.zeros_like(batch.weights) if batch.ages is None else batch.ages
        left_out = importance.too_old(ages, batch.mask, oldest=oldest)
        metrics["too_old_share"] = (left_out.sum().float(), batch.mask.sum().float())
        return replace(batch, weights=clean(batch.weights, ~left_out))

    def _policy(self, batch: TokenBatch) -> losses.PolicyLoss:
        loss = self.config.loss
        three = batch.logprobs, batch.old_logprobs, batch.advantages
        if loss.kind == "gspo":
            return losses.gspo_loss(
                *three,
                lengths=batch.lengths,
                mask=batch.mask,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
            )
        if loss.kind == "cispo":
            return losses.cispo_loss(*three, clip_low=loss.clip_low, clip_high=loss.clip_high)
        if loss.kind == "sapo":
            positive, negative = loss.temperatures
            return losses.sapo_loss(*three, temperature_positive=positive, temperature_negative=negative)
        if loss.kind == "reinforce":
            ratio = torch.exp(losses.log_ratio(batch.logprobs.detach(), batch.old_logprobs))
            never = torch.zeros_like(batch.mask)
            per_token = losses.reinforce_loss(batch.logprobs, batch.advantages)
            return losses.PolicyLoss(per_token, ratio, never, never)
        assert loss.kind == "clipped"
        return losses.clipped_policy_loss(
            *three, clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip
        )

    def _correction(self, batch: TokenBatch, metrics: Metrics) -> Tensor:
        """What multiplies the policy loss [N]; figures of the sampler's gap go to the metrics."""
        c = self.config.correction
        gap = batch.old_logprobs, batch.rollout_logprobs, batch.mask, batch.lengths
        metrics |= importance.metrics(*gap, c)
        factor = importance.correct(importance.log_weights(*gap, level=c.level), c)
        if c.veto is not None:
            factor = factor * importance.veto(*gap, lowest=c.veto)
        if c.opsm_delta is not None:
            factor = factor * importance.opsm(
                batch.logprobs,
                batch.rollout_logprobs,
                batch.advantages,
                batch.mask,
                batch.lengths,
                delta=c.opsm_delta,
            )
        if c.max_token_age is not None and batch.ages is not None:
            factor = clean(factor, ~importance.too_old(batch.ages, batch.mask, oldest=c.max_token_age))
        metrics |= importance.applied_metrics(factor, batch.mask)
        left_out = ((factor == 0) & batch.mask).sum().float()
        metrics["left_out_share"] = (left_out, batch.mask.sum().float())
        return factor

    def _regularisation(self, batch: TokenBatch, metrics: Metrics) -> Tensor:
        """Terms of KL, entropy and a teacher (scalar), aggregated like the policy loss; metrics get the KLs' token means."""
        total = batch.logprobs.new_zeros(())
        if self.needs_ref and batch.ref_logprobs is None:
            raise TrainerError(
                "algorithm.kl_coef is above 0, but the batch carries no reference log-probabilities"
            )
        if batch.ref_logprobs is not None:
            old = batch.old_logprobs if self.config.kl_unbiased else None
            kind, mask = self.config.kl_kind, batch.mask
            kl = kl_estimate(batch.logprobs, batch.ref_logprobs, kind, mask=mask, old_logprobs=old)
            metrics["kl"] = (kl.detach().sum(), mask.sum().float())
            if self.needs_ref and self.config.kl_placement == "loss":
                total = total + self.kl_coef * self._reduce(kl, batch)
        if self.needs_entropy:
            if batch.entropy is None:
                raise TrainerError("algorithm.entropy_coef is above 0, but the batch carries no entropy")
            total = total - self.config.entropy_coef * self._reduce(batch.entropy, batch)
        if self.teacher_top_k:
            total = total + self.config.distillation_coef * self._reduce(_teacher_kl(batch, metrics), batch)
        return total


def _teacher_kl(batch: TokenBatch, metrics: Metrics) -> Tensor:
    """KL [N] from the teacher over its likeliest tokens; its token mean goes to the metrics."""
    if batch.top_logprobs is None or batch.teacher_top_logprobs is None:
        raise TrainerError(
            "algorithm.teacher_server.top_k is above 0, but the batch carries no likeliest tokens of the teacher"
        )
    kl = clean(losses.top_k_kl(batch.top_logprobs, batch.teacher_top_logprobs), batch.mask)
    metrics["teacher_kl"] = (kl.detach().sum(), batch.mask.sum().float())
    return kl


def _cleaned(batch: TokenBatch) -> TokenBatch:
    """The batch in fp32 or better, with a bool mask and exact zeros on masked tokens."""
    mask = batch.mask.bool()
    cleaned: dict[str, Tensor] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if value is not None and item.name not in ("mask", "lengths"):
            cleaned[item.name] = clean(upcast(value), mask)
    return replace(batch, mask=mask, **cleaned)


def _policy_metrics(batch: TokenBatch, policy: losses.PolicyLoss) -> Metrics:
    """Shares and means over unmasked tokens; approx_kl is k3 of KL(old policy || new policy)."""
    mask = batch.mask
    count = mask.sum().float()
    approx = kl_estimate(batch.old_logprobs, batch.logprobs.detach(), "k3", mask=mask)
    low, high = policy.clipped_low & mask, policy.clipped_high & mask
    return {
        "clip_share_low": (low.sum().float(), count),
        "clip_share_high": (high.sum().float(), count),
        "clip_share": ((low | high).sum().float(), count),
        "ratio_mean": (clean(policy.ratio, mask).sum(), count),
        "ratio_distance": (clean((policy.ratio - 1).abs(), mask).sum(), count),
        "approx_kl": (approx.sum(), count),
        "advantage_mean": (batch.advantages.sum(), count),
    }


def derived(means: Mapping[str, float]) -> dict[str, float]:
    """The means of a step (weighted sums over weights, by name) and what follows from several of them:

    importance_std = sqrt(mean squared distance from c - (mean - c)^2), with c = 0 or 1, the nearer one to the mean: there
    the difference loses the fewest digits; importance_ess = mean^2 / second moment (effective sample size as a share); ess,
    the same of the weights that multiply the loss.
    """
    found = dict(means)
    applied, applied_second = means.get("correction_mean"), found.pop("correction_second", None)
    if applied is not None and applied_second is not None:
        found["ess"] = applied * applied / applied_second if applied_second > 0 else 0.0
    mean, second = means.get("importance_mean"), means.get("importance_second")
    about_one = found.pop("importance_about_one", None)
    if mean is not None and second is not None and about_one is not None:
        variance = second - mean**2 if mean < 0.5 else about_one - (mean - 1) ** 2
        found["importance_std"] = max(0.0, variance) ** 0.5
        found["importance_ess"] = mean * mean / second if second > 0 else 0.0
    return found


def check_on_policy(metrics: Mapping[str, float], *, kl_limit: float = 1e-9) -> None:
    """Check the first step on a batch that the same weights generated: ratio exactly 1, KL below `kl_limit` nats.

    metrics: means by name as this module names them; `ratio_distance` (mean |ratio - 1|) and `approx_kl` are checked. A
    caller who knows that the reference still equals the policy passes `kl` as `first_kl`, which is then checked too.
    Errors: TrainerError naming what is off, or that a figure is missing.
    """
    if "ratio_distance" not in metrics or "approx_kl" not in metrics:
        raise TrainerError(
            "the first step reports no ratio_distance or approx_kl, so that it cannot be checked"
        )
    distance = metrics["ratio_distance"]
    if distance != 0.0:
        raise TrainerError(
            f"on the first step of an on-policy batch the ratio must be exactly 1; its mean distance from 1 is {distance:.3g}. "
            "The old log-probabilities do not come from the weights being trained"
        )
    for name in ("approx_kl", "first_kl"):
        value = metrics.get(name, 0.0)
        if not abs(value) < kl_limit:
            raise TrainerError(
                f"on the first step of an on-policy batch {name} must be below {kl_limit:g} nats; it is {value:.3g}"
            )
