"""PPO's critic: values of response tokens, and the gradient of the value loss.

A second model with a scalar head that starts at zero, and with a separate optimizer and schedule. It starts from the policy's
folder, or from algorithm.advantage.critic.path. Reads returns from the batch. Value loss: token mean over the global batch.
"""

import torch
from torch import Tensor

from millrace.connectors.trainers.passes import Metrics, MetricSums, ValuePasses
from millrace.connectors.trainers.rank_batch import RankBatch
from millrace.connectors.trainers.trained_model import TrainedModel
from millrace.core.algorithms.aggregate import clean
from millrace.core.algorithms.losses import value_loss
from millrace.core.config.algorithm import Critic


class RankCritic:
    """The value model of this rank."""

    def __init__(self, config: Critic, trainable: TrainedModel, passes: ValuePasses) -> None:
        self.config = config
        self.trainable = trainable
        self.passes = passes

    def values(self, batch: RankBatch) -> Tensor | None:
        """Value of the state before each response token [N], without gradients; None before the last stage."""
        return self.passes.values(batch.packs)

    def forward_backward(self, batch: RankBatch, sums: MetricSums) -> None:
        """Compute the gradients of the value loss against the batch's `returns`, clipped around its `values`."""
        spans = batch.spans()

        def loss(number: int, values: Tensor) -> tuple[Tensor, Metrics]:
            span = spans[number]
            mask = batch.mask[span].bool()
            old, returns = clean(batch.per_token["values"][span], mask), batch.per_token["returns"][span]
            values = clean(values, mask)
            per_token = clean(value_loss(values, old, returns, clip=self.config.clip), mask)
            count, detached = mask.sum().float(), values.detach()
            clipped = (
                (detached - old).abs() > self.config.clip if self.config.clip else torch.zeros_like(mask)
            )
            total = per_token.sum() * batch.token_weight
            return total, {
                "value_loss": (per_token.detach().sum(), count),
                "value_mean": (detached.sum(), count),
                "value_clip_share": ((clipped & mask).sum().float(), count),
                "return_mean": (returns.sum(), count),
                "return_second": (returns.square().sum(), count),
                "value_error": ((returns - old).sum(), count),
                "value_error_second": ((returns - old).square().sum(), count),
            }

        self.passes.forward_backward(batch.packs, self.passes.token_values, loss, sums, forward_only=False)


def explained_variance(means: dict[str, float]) -> dict[str, float]:
    """Replace the moments in the metrics by value_explained = 1 - var(returns - values) / var(returns)."""
    metrics = dict(means)
    moments = [metrics.pop(name, 0.0) for name in ("return_second", "value_error", "value_error_second")]
    second, error, error_second = moments
    variance = second - means["return_mean"] ** 2
    metrics["value_explained"] = 1 - (error_second - error**2) / variance if variance > 1e-12 else 0.0
    return metrics
