"""megatron's router with the scores of sigmoids, as `core.families.routing` defines them.

megatron's own takes other groups than Hugging Face and SGLang, and always normalises weights.
"""

from typing import Any

import torch
from torch import Tensor

from millrace.connectors.trainers.megatron.model.replayed_router import PackRouter
from millrace.core.families.architecture import Architecture


class SigmoidRouter(PackRouter):
    """A router whose bias is read from the checkpoint and never changes."""

    def __init__(self, *, config: Any, pg_collection: Any, **more: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **more)
        arch: Architecture = config.arch
        assert arch.routing is not None
        self.scores, self.normalised = arch.routing, arch.norm_topk
        bias = torch.full((arch.experts,), torch.nan, device=self.weight.device)
        self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # casts of a model, megatron's among them, must not round the bias: other experts would be chosen
        exact = self.expert_bias.data
        super()._apply(fn, recurse)
        self.expert_bias.data = exact.to(self.expert_bias.device)
        return self

    def own_choice(self, logits: Tensor) -> Tensor:
        """The experts [T, k] that the router would choose, from logits [T, E]."""
        chosen: Tensor = self.scores.chosen(logits, self.expert_bias, self.topk)
        return chosen

    def routed(self, logits: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and the map of tokens to experts, both [T, E], from logits [T, 1, E]."""
        assert padding_mask is None, "a pack's padding is routed like its tokens"
        flat = logits.view(-1, logits.shape[-1])
        if self.router_replay is None:
            chosen = self.own_choice(flat)
        else:
            _, chosen = self.router_replay.get_replay_topk(
                flat, self.topk, default_compute_topk=lambda scores, *_: (scores, self.own_choice(scores))
            )
        weights = self.scores.weights(flat, chosen, normalised=self.normalised)
        empty = torch.zeros_like(flat)
        return empty.scatter(1, chosen, weights), empty.bool().scatter(1, chosen, True)
