"""Estimators of KL(policy || reference) from log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Kind = Literal["k1", "k2", "k3", "low_var", "abs"]
LIMIT = 10.0  # low_var: the k3 estimate is clamped to [-LIMIT, LIMIT]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Kind) -> Tensor:
    """Per-token estimate [N] from d = log p - log q (Schulman 2020, "Approximating KL divergence").

    k1 = d; k2 = d²/2; k3 = e^-d - 1 + d; low_var = k3 clamped to ±10; abs = |d|.
    """
    d = logprobs.float() - ref_logprobs.float()
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "abs":
        return d.abs()
    k3 = (-d).exp() - 1 + d
    return k3.clamp(-LIMIT, LIMIT) if kind == "low_var" else k3
