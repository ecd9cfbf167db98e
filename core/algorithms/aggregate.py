"""How token losses become one number. Denominators come from the whole global batch, before any split.

The loss is a weighted sum over tokens; the weights here are fixed for the step, so that every split into packs and
ranks adds up to the same loss and the same gradient.
"""

from __future__ import annotations

from torch import Tensor


def token_mean(counts: Tensor) -> Tensor:
    """Weights [B] of each sample's tokens: 1 / all unmasked tokens of the batch. `counts` [B]: unmasked tokens a sample."""
    return (1.0 / counts.double().sum().clamp(min=1)).expand(len(counts))


def sequence_mean(counts: Tensor) -> Tensor:
    """Weights [B]: each sample's mean, averaged over the samples that have tokens (GRPO, arXiv:2402.03300, eq. 3)."""
    alive = (counts > 0).double()
    return alive / counts.double().clamp(min=1) / alive.sum().clamp(min=1)


def constant(counts: Tensor, length: int) -> Tensor:
    """Weights [B]: 1 / (samples × a constant length), so that long answers weigh more (Dr.GRPO, arXiv:2503.20783)."""
    return (1.0 / ((counts > 0).double().sum().clamp(min=1) * length)).expand(len(counts))
