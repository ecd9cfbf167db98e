"""PPO's critic: values of response tokens, and the gradient of the value loss.

A model of its own with the policy's architecture and initial weights, a scalar head that starts at zero, its own
optimizer and schedule. Owns nothing of returns: they are given. Value loss: token mean over the global batch.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel as tp
from torch import Tensor
from torch.nn import functional as F

from millrace.connectors.megatron.forward_backward import Metrics, Runner, Sums
from millrace.connectors.megatron.model.fused import rows
from millrace.connectors.megatron.model.policy_model import CriticModel
from millrace.connectors.megatron.packing import Pack
from millrace.connectors.megatron.rank_batch import Share
from millrace.connectors.megatron.trainable_model import Trained, from_hf
from millrace.core.algorithms.losses import value_loss
from millrace.core.algorithms.packed import clean
from millrace.core.config import RunConfig


class Critic:
    """The value model of this rank."""

    def __init__(self, config: RunConfig, hf: dict[str, Any], device: Any) -> None:
        self.config = config.algorithm.critic
        inner = from_hf(config, config.model.path, hf, device, CriticModel)
        self.trained = Trained(inner, config, self.config.lr)
        self.runner = Runner(config, self.trained.model, inner, device)
        self._sequence = config.trainer.parallel.sequence

    def values(self, share: Share) -> Tensor | None:
        """Value of the state before each response token [N], without gradients; None before the last stage."""
        return self.runner.collect(share.packs, self._values)

    def forward_backward(self, share: Share, sums: Sums) -> None:
        """Gradients of the value loss towards the share's `returns`, around its `values`."""
        spans = share.spans()

        def loss(number: int, pack: Pack, hidden: Tensor) -> tuple[Tensor, Metrics]:
            span = spans[number]
            mask = share.mask[span].bool()
            old, returns = clean(share.figures["values"][span], mask), share.figures["returns"][span]
            values = clean(self._values(pack, hidden), mask)
            each = clean(value_loss(values, old, returns, clip=self.config.clip), mask)
            count, found = mask.sum().float(), values.detach()
            far = (found - old).abs() > self.config.clip if self.config.clip else torch.zeros_like(mask)
            total = each.sum() * share.token_weight
            return total, {
                "value_loss": (each.detach().sum(), count),
                "value_mean": (found.sum(), count),
                "value_clip_share": ((far & mask).sum().float(), count),
                "return_mean": (returns.sum(), count),
                "return_second": (returns.square().sum(), count),
                "value_error": ((returns - old).sum(), count),
                "value_error_second": ((returns - old).square().sum(), count),
            }

        self.runner.forward_backward(share.packs, loss, sums, forward_only=False)

    def _values(self, pack: Pack, hidden: Tensor) -> Tensor:
        if self._sequence:
            hidden = tp.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        head = self.trained.inner.value_head
        chosen = rows(hidden.squeeze(1), pack.places).to(head.weight.dtype)
        return self.runner.whole(pack, F.linear(chosen, head.weight, head.bias)[:, 0].float())


def explained_variance(means: dict[str, float]) -> dict[str, float]:
    """What the critic's figures come to: 1 - var(returns - values) / var(returns), in place of the moments."""
    kept = dict(means)
    moments = [kept.pop(name, 0.0) for name in ("return_second", "value_error", "value_error_second")]
    second, error, error_second = moments
    variance = second - means["return_mean"] ** 2
    kept["value_explained"] = 1 - (error_second - error**2) / variance if variance > 1e-12 else 0.0
    return kept
