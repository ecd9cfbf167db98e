"""Routers that take the experts which an engine chose, by megatron's RouterReplay; and how often they would have chosen the same.

A pack's rows travel with its bounds, so that every pass finds those of its pack: recomputation, pipeline stages and virtual ones
too. A token's weights are those of the current router at the replayed experts, and the gradient reaches the router through them.
A token without a row, such as padding, is routed by the router itself. Knows nothing of where rows come from.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from millrace.connectors.trainers.megatron.model.attention import PackBounds
from millrace.core.families.architecture import Architecture


class RoutingAgreement:
    """How many of the replayed experts the routers of one model would have chosen themselves, on this rank."""

    def __init__(self) -> None:
        self._same: Tensor | None = None
        self._all: Tensor | None = None

    def add(self, own: Tensor, replayed: Tensor) -> None:
        """Count the tokens of one layer in one pass. Both [T, k]; rows of -1 in `replayed` do not count."""
        same = (own[:, :, None] == replayed[:, None, :]).any(-1).sum()
        count = (replayed >= 0).sum()
        self._same = same if self._same is None else self._same + same
        self._all = count if self._all is None else self._all + count

    def take(self) -> tuple[Tensor, Tensor] | None:
        """The number of experts that agree and of all, since the last call; None without any."""
        same, count, self._same, self._all = self._same, self._all, None, None
        return None if same is None or count is None else (same.float(), count.float())


class PackRouter(TopKRouter):
    """megatron's router, which knows the pack that it routes: `bounds`, set before each pass."""

    def __init__(self, *, config: Any, pg_collection: Any, **more: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **more)  # more: since megatron-core 0.17
        self.bounds: PackBounds | None = None
        self.agreement = RoutingAgreement()
        if self.router_replay is not None:
            # megatron lists the replays of all models of a process, and would keep them for ever
            RouterReplay.global_router_replay_instances.remove(self.router_replay)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and the map of tokens to experts, both [T, E], from logits [T, 1, E]."""
        if self.router_replay is not None:
            self._aim(logits.detach().view(-1, logits.shape[-1]))
        routed: tuple[Tensor, Tensor] = self.routed(logits, padding_mask)
        return routed

    def routed(self, logits: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same, with the experts that `router_replay` holds."""
        found: tuple[Tensor, Tensor] = super().routing(logits, padding_mask)
        return found

    def own_choice(self, logits: Tensor) -> Tensor:
        """The experts [T, k] that the router would choose, from logits [T, E]."""
        return logits.topk(self.topk, dim=1).indices

    def _aim(self, logits: Tensor) -> None:
        """Let `router_replay` hold the experts of this layer's tokens; none if the pack has no rows."""
        assert self.bounds is not None
        if self.bounds.routed is None:
            self.router_replay.clear_router_replay_action()
            self.router_replay.clear_indices()
            return
        arch: Architecture = self.config.arch
        rows = self.bounds.routed[:, arch.expert_layers.index(self.layer_number - 1)]
        # megatron requires sequence parallelism for experts, so a tensor parallel rank has a part of the tokens
        if self.tp_group.size() > 1:
            rows = rows.chunk(self.tp_group.size())[self.tp_group.rank()]
        own, rows = self.own_choice(logits), rows.long()
        self.router_replay.clear_indices()  # a layer's pass takes them at once, so megatron need not keep them for the next
        self.router_replay.set_target_indices(torch.where(rows < 0, own, rows))
        self.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        if torch.is_grad_enabled():  # recomputed layers come twice, first without gradients
            self.agreement.add(own, rows)
