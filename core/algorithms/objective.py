"""The training objective of one pack: policy loss, correction, KL and entropy, as the configuration composes them.

Owns the composition and its metrics; knows nothing of the model, of packs to come or of ranks. Loss and metrics are sums
over the pack, so that sums over packs and data-parallel ranks are exact for the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.algorithms import importance, losses
from core.algorithms.aggregate import reduce, sample_weights
from core.algorithms.kl import kl_estimate
from core.algorithms.packed import clean, upcast
from core.config.algorithm import Algorithm
from core.errors import TrainerError
from core.hooks import load

Metrics = dict[str, tuple[Tensor, Tensor]]


@dataclass
class TokenBatch:
    """Response tokens of the B samples of one pack, end to end in one dimension N; samples are whole."""

    logprobs: Tensor  # [N] trainer's log-probs at sampling temperature; carries the gradient
    old_logprobs: Tensor  # [N] the policy that the ratio is taken against
    rollout_logprobs: Tensor  # [N] the engine's
    ref_logprobs: Tensor | None  # [N] reference model's
    advantages: Tensor  # [N]
    mask: Tensor  # [N] 1: in the loss
    lengths: Tensor  # [B] response lengths, sum = N
    weights: Tensor  # [N] see core.algorithms.aggregate; loss = sum of weights * token loss
    entropy: Tensor | None = None  # [N] nats; carries the gradient when an entropy bonus is set
    values: Tensor | None = None  # [N] critic; carries the gradient
    returns: Tensor | None = None  # [N]
    old_values: Tensor | None = None  # [N]


class Objective:
    """Loss and metrics of a pack under one `algorithm` section. Stateless but for `kl_coef`, which a controller may move."""

    def __init__(self, config: Algorithm) -> None:
        self.config = config
        self.kl_coef = config.kl_coef
        self._custom = load(config.loss_function, "algorithm.loss_function") if config.loss_function else None

    @property
    def supervised(self) -> bool:
        """Whether the loss is the plain likelihood of the responses."""
        return self.config.loss == "sft"

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy bonus, so that `entropy` must carry a gradient."""
        return self.config.entropy_coef > 0 and self.config.loss != "sft"

    @property
    def needs_ref(self) -> bool:
        """Whether reference log-probabilities are needed, in the loss or in the reward."""
        return self.config.kl_coef > 0 and self.config.loss != "sft"

    @property
    def needs_old(self) -> bool:
        """Whether a ratio against the trainer's own earlier log-probabilities is taken."""
        return self.config.loss not in ("sft", "reinforce") and self.config.old_logprobs != "rollout"

    @property
    def needs_recompute(self) -> bool:
        """Whether those need a forward pass even when an iteration makes one step (old_logprobs=recompute)."""
        return self.needs_old and self.config.old_logprobs == "recompute"

    def sample_weights(self, counts: Tensor, longest: int) -> Tensor:
        """Weight [B] of each sample's tokens from `counts` [B], the unmasked tokens of every sample of the global batch.

        longest: tokens, the generation budget (rollout.sampling.max_new_tokens)."""
        return sample_weights(counts, self.config, max_length=longest)

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """Loss (scalar, to be summed over packs and ranks) and metrics as (weighted sum, weight) pairs.

        Errors: TrainerError when something the configuration needs (reference, entropy) is not in the batch.
        """
        mask = batch.mask.bool()
        logprobs = clean(upcast(batch.logprobs), mask)
        if self.config.loss == "sft":
            loss = reduce(losses.sft_loss(logprobs), mask, batch.weights)
            count = mask.sum().float()
            return loss, {
                "pg_loss": (loss.detach(), clean(batch.weights, mask).sum()),
                "nll": (-logprobs.detach().sum(), count),
            }
        if self._custom is not None:
            per_token, extra = self._custom(batch)
            loss = reduce(per_token, mask, batch.weights)
            return loss, {"pg_loss": (loss.detach(), clean(batch.weights, mask).sum()), **dict(extra)}
        policy = self._policy(batch, logprobs, mask)
        factor, metrics = self._correct(batch, logprobs, mask)
        pg_loss = reduce(policy.loss * factor, mask, batch.weights)
        metrics |= _policy_metrics(batch, policy, pg_loss, logprobs, mask)
        loss = pg_loss
        if self.needs_ref and self.config.kl_placement == "loss":
            loss = loss + self.kl_coef * self._kl(batch, logprobs, mask, metrics)
        elif batch.ref_logprobs is not None:
            self._kl(batch, logprobs, mask, metrics)
        if batch.entropy is not None:
            metrics["entropy"] = (clean(batch.entropy.detach().float(), mask).sum(), mask.sum().float())
        if self.needs_entropy:
            if batch.entropy is None:
                raise TrainerError("algorithm.entropy_coef is above 0, but the batch carries no entropy")
            loss = loss - self.config.entropy_coef * reduce(upcast(batch.entropy), mask, batch.weights)
        return loss, metrics

    def _policy(self, batch: TokenBatch, logprobs: Tensor, mask: Tensor) -> losses.PolicyLoss:
        c = self.config
        old = clean(upcast(batch.old_logprobs), mask)
        advantages = clean(upcast(batch.advantages), mask)
        if c.loss == "gspo":
            return losses.gspo_loss(
                logprobs,
                old,
                advantages,
                lengths=batch.lengths,
                mask=mask,
                clip_low=c.clip_low,
                clip_high=c.clip_high,
            )
        if c.loss == "cispo":
            return losses.cispo_loss(logprobs, old, advantages, clip_low=c.clip_low, clip_high=c.clip_high)
        if c.loss == "sapo":
            positive, negative = c.sapo_temperatures
            return losses.sapo_loss(
                logprobs, old, advantages, temperature_positive=positive, temperature_negative=negative
            )
        if c.loss == "reinforce":
            ratio = torch.exp(losses.log_ratio(logprobs.detach(), old))
            never = torch.zeros_like(mask)
            return losses.PolicyLoss(losses.reinforce_loss(logprobs, advantages), ratio, never, never)
        return losses.clipped_policy_loss(
            logprobs, old, advantages, clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip
        )

    def _correct(self, batch: TokenBatch, logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
        """What multiplies the policy loss [N], and the metrics of the sampler's gap."""
        c = self.config.correction
        metrics = importance.metrics(
            batch.old_logprobs, batch.rollout_logprobs, mask, batch.lengths, self.config
        )
        gap = importance.log_weights(
            batch.old_logprobs, batch.rollout_logprobs, mask, batch.lengths, level=c.level
        )
        factor = importance.correct(gap, c)
        if c.veto is not None:
            factor = factor * importance.veto(
                batch.old_logprobs, batch.rollout_logprobs, mask, batch.lengths, lowest=c.veto
            )
        if c.opsm_delta is not None:
            factor = factor * importance.opsm(
                logprobs, batch.rollout_logprobs, batch.advantages, mask, batch.lengths, delta=c.opsm_delta
            )
        if c.kind != "none" or c.veto is not None or c.opsm_delta is not None:
            metrics["left_out_share"] = (((factor == 0) & mask).sum().float(), mask.sum().float())
        return factor, metrics

    def _kl(self, batch: TokenBatch, logprobs: Tensor, mask: Tensor, metrics: Metrics) -> Tensor:
        """KL against the reference, aggregated as the loss is; its plain token mean goes to the metrics."""
        if batch.ref_logprobs is None:
            raise TrainerError(
                "algorithm.kl_coef is above 0, but the batch carries no reference log-probabilities"
            )
        old = batch.old_logprobs if self.config.kl_unbiased else None
        per_token = kl_estimate(
            logprobs, batch.ref_logprobs, self.config.kl_kind, mask=mask, old_logprobs=old
        )
        metrics["kl"] = (per_token.detach().sum(), mask.sum().float())
        return reduce(per_token, mask, batch.weights)


def _policy_metrics(
    batch: TokenBatch, policy: losses.PolicyLoss, pg_loss: Tensor, logprobs: Tensor, mask: Tensor
) -> Metrics:
    """Shares and means over unmasked tokens; approx_kl is k3 of the old policy from the new one."""
    count = mask.sum().float()
    old = clean(upcast(batch.old_logprobs), mask)
    approx = kl_estimate(old, logprobs.detach(), "k3", mask=mask)
    far = clean((policy.ratio - 1).abs(), mask)
    return {
        "pg_loss": (pg_loss.detach(), clean(batch.weights, mask).sum()),
        "clip_share_low": ((policy.clipped_low & mask).sum().float(), count),
        "clip_share_high": ((policy.clipped_high & mask).sum().float(), count),
        "clip_share": (((policy.clipped_low | policy.clipped_high) & mask).sum().float(), count),
        "ratio_mean": (clean(policy.ratio, mask).sum(), count),
        "ratio_distance": (far.sum(), count),
        "approx_kl": (approx.sum(), count),
        "advantage_mean": (clean(upcast(batch.advantages), mask).sum(), count),
    }


def on_policy_guard(metrics: Mapping[str, float], *, kl_limit: float = 1e-9) -> None:
    """Check the first step on a batch that the same weights generated: ratio exactly 1 and KL below `kl_limit` nats.

    metrics: means by name as this module names them. `kl` (against the reference) is looked at by callers that know
    the reference still equals the policy: pass it as `first_kl`.
    Errors: TrainerError naming what is off.
    """
    distance = metrics.get("ratio_distance", 0.0)
    if distance != 0.0:
        raise TrainerError(
            f"on the first step of an on-policy batch the ratio must be exactly 1; its mean distance from 1 is {distance:.3g}. "
            "The old log-probabilities are not those of the weights being trained"
        )
    for name in ("approx_kl", "first_kl"):
        if metrics.get(name, 0.0) >= kl_limit:
            raise TrainerError(
                f"on the first step of an on-policy batch {name} must be below {kl_limit:g} nats; it is {metrics[name]:.3g}"
            )
