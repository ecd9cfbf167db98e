"""The loss of one pack, as the configuration composes it. Sees whole samples; knows nothing of ranks or packs.

Every token's weight is fixed over the global batch before, so packs and ranks add up to one loss. Metrics are pairs
(weighted sum, weight), so that they too are exact under any split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.algorithms import aggregate
from core.algorithms.kl import kl_estimate
from core.algorithms.losses import clipped_policy_loss, sft_loss
from core.config.algorithm import Algorithm

Metrics = dict[str, tuple[Tensor, Tensor]]


@dataclass
class TokenBatch:
    """The response tokens of a pack's B samples in one dimension N."""

    logprobs: Tensor  # [N] at the sampling temperature; carries the gradient
    old_logprobs: Tensor  # [N]
    rollout_logprobs: Tensor  # [N] as the engine gave them
    advantages: Tensor  # [N]
    mask: Tensor  # [N] 1 where the token is in the loss
    lengths: Tensor  # [B], sums to N
    weights: Tensor  # [N] weight of each token's loss in the global batch
    ref_logprobs: Tensor | None = None  # [N]
    entropy: Tensor | None = None  # [N]


class Objective:
    """Composes policy loss, KL and entropy terms."""

    def __init__(self, config: Algorithm) -> None:
        self.config = config

    @property
    def supervised(self) -> bool:
        """Whether the loss is the plain likelihood of the responses."""
        return self.config.loss == "sft"

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy of each token's distribution enters the loss."""
        return self.config.entropy_coef > 0

    @property
    def needs_ref(self) -> bool:
        """Whether log-probabilities of the reference model are needed."""
        return self.config.kl_coef > 0

    def sample_weights(self, counts: Tensor, longest: int) -> Tensor:
        """Weight [B] of each sample's tokens. `counts` [B]: unmasked tokens of every sample of the global batch."""
        if self.config.aggregation == "sequence_mean":
            return aggregate.sequence_mean(counts)
        if self.config.aggregation == "constant":
            return aggregate.constant(counts, longest)
        return aggregate.token_mean(counts)

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """The pack's share of the loss (a sum), and its share of every metric."""
        mask = batch.mask.float()
        weights = batch.weights.float() * mask
        count = mask.sum()
        metrics: Metrics = {}
        if self.supervised:
            token_loss = sft_loss(batch.logprobs)
            loss = _sum(token_loss, weights)
            return loss, {"loss": (loss.detach(), torch.ones_like(count))}
        token_loss, clipped = clipped_policy_loss(
            batch.logprobs,
            batch.old_logprobs,
            batch.advantages,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )
        loss = _sum(token_loss, weights)
        one = torch.ones_like(count)
        metrics["pg_loss"] = (loss.detach(), one)
        metrics["clip_share"] = (_sum(clipped.float(), mask), count)
        log_ratio = batch.logprobs.detach().float() - batch.old_logprobs.float()
        metrics["ratio_mean"] = (_sum(log_ratio.exp(), mask), count)
        metrics["approx_kl"] = (
            _sum(kl_estimate(batch.old_logprobs, batch.logprobs.detach(), "k3"), mask),
            count,
        )
        if self.needs_ref:
            assert batch.ref_logprobs is not None
            kl = kl_estimate(batch.logprobs, batch.ref_logprobs, self.config.kl_kind)
            loss = loss + self.config.kl_coef * _sum(kl, weights)
            metrics["kl"] = (_sum(kl.detach(), mask), count)
        if batch.entropy is not None:
            metrics["entropy"] = (_sum(batch.entropy.detach().float(), mask), count)
            if self.needs_entropy:
                loss = loss - self.config.entropy_coef * _sum(batch.entropy.float(), weights)
        metrics["loss"] = (loss.detach(), one)
        return loss, metrics


def _sum(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum in which tokens of weight 0 count as exactly 0, whatever they hold."""
    return torch.where(weights != 0, values * weights, torch.zeros_like(values)).sum()
