"""A token loss: REINFORCE with the ratio's weight bounded from above, and how often the bound holds as a metric."""

from __future__ import annotations

from torch import Tensor

from millrace import TokenBatch


def bounded(batch: TokenBatch, *, bound: float = 2.0) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """-min(r, bound) A log pi for each token; r = pi / pi_old carries no gradient."""
    ratio = (batch.logprobs.detach() - batch.old_logprobs).exp()
    loss = -ratio.clamp(max=bound) * batch.advantages * batch.logprobs
    at_bound = ((ratio > bound) & batch.mask.bool()).sum().float()
    return loss, {"bounded_share": (at_bound, batch.mask.sum().float())}
