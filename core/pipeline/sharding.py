"""Which groups of an iteration belong to which shard, and what a run must leave out to be cut into shards.

Owns the rule that each group of a draw belongs to exactly one shard, whatever finishes first. Knows nothing of processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.config import RunConfig


@dataclass(frozen=True)
class Share:
    """The part of an iteration that one shard makes: of every `of` groups in drawing order, those at these places."""

    places: tuple[int, ...] = (0,)
    of: int = 1

    def holds(self, ordinal: int) -> bool:
        """Whether the group with this place in the draw belongs to it."""
        return ordinal % self.of in self.places

    def part_of(self, whole: int) -> int:
        """Its part of a number that all shards share, at least 1."""
        return max(1, math.ceil(whole * len(self.places) / self.of))


WHOLE = Share()


@dataclass(frozen=True)
class PlacedShare:
    """A shard's share, and the node that it is made on; None: any."""

    share: Share
    node: str | None


def shares(nodes: Sequence[str], shards: int | None) -> list[PlacedShare]:
    """The shares of an iteration. nodes: of the engines, one each; empty if they are not known. shards: None for one a node.

    One a node: a node's shard has as many groups as the node has engines. A given number has equal shares, spread over the nodes.
    """
    distinct = list(dict.fromkeys(nodes))
    if shards is not None:
        where: list[str | None] = list(distinct) or [None]
        return [PlacedShare(Share((at,), shards), where[at % len(where)]) for at in range(shards)]
    if not distinct:
        return [PlacedShare(WHOLE, None)]
    return [
        PlacedShare(Share(tuple(at for at, of in enumerate(nodes) if of == node), len(nodes)), node)
        for node in distinct
    ]


INSTEAD = {  # what to do about a field that has a value which shards can do
    "pipeline.on_update": "set pipeline.on_update=resend",
}


def not_in_shards(config: RunConfig) -> dict[str, str]:
    """What of a configuration shards cannot do yet, by field: why."""
    p, e = config.pipeline, config.engines
    found = {
        "algorithm.loss": "supervised training generates nothing" if config.algorithm.supervised else "",
        "pipeline.rollouts_from": "the rollouts are another run's" if p.rollouts_from else "",
        "pipeline.on_update": "the driver alone knows under which weights an engine's cache was computed"
        if p.ahead and p.on_update == "keep"
        else "",
        "algorithm.teacher_server": "the driver asks the served teacher"
        if config.algorithm.teacher_server
        else "",
        "engines.router": "the router gets its requests from the driver" if e.router else "",
        "engines.prefill": "the driver pairs engines that prefill with those that decode"
        if e.prefill
        else "",
    }
    return {field: reason for field, reason in found.items() if reason}


def in_shards(config: RunConfig) -> bool:
    """Whether rollout, reward and evaluations run as Ray tasks. auto: on a cluster that the run joins, where nothing needs the driver."""
    runner = config.placement.task_runner
    if runner == "auto":
        return config.placement.ray_address is not None and not not_in_shards(config)
    return runner == "ray"
