"""Which groups of an iteration belong to which shard, and what a run with shards must leave out.

Owns the rule that each group of a draw belongs to exactly one shard, in any order of finishing. Knows nothing of processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.config import RunConfig


@dataclass(frozen=True)
class Share:
    """The part of an iteration that one shard makes: in every `of` groups in drawing order, the groups at these places."""

    places: tuple[int, ...] = (0,)
    of: int = 1

    def holds(self, ordinal: int) -> bool:
        """Whether the group at this place of the draw belongs to the share."""
        return ordinal % self.of in self.places

    def part_of(self, whole: int) -> int:
        """The share's part of a number that all shards divide, at least 1."""
        return max(1, math.ceil(whole * len(self.places) / self.of))


WHOLE = Share()


@dataclass(frozen=True)
class PlacedShare:
    """A shard's share, and its node; None: any node."""

    share: Share
    node: str | None


def shares(nodes: Sequence[str], shards: int | None) -> list[PlacedShare]:
    """The shares of an iteration. nodes: the node of each engine; empty if unknown. shards: None for one a node.

    With one shard a node, a shard gets groups in proportion to its node's engines. A given number of shards get equal shares,
    spread over the nodes.
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


INSTEAD = {  # the remedy for a field that has another value which shards support
    "pipeline.on_update": "set pipeline.on_update=resend",
    "sync.lora": "set sync.lora=merged",
}


def not_in_shards(config: RunConfig) -> dict[str, str]:
    """Fields of a configuration that shards do not support yet, with the reason."""
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
        "sync.lora": "the driver alone knows the names of adapters" if config.adapters_by_name else "",
        "engines.prefill": "the driver pairs engines that prefill with those that decode"
        if e.prefill
        else "",
    }
    return {field: reason for field, reason in found.items() if reason}


def in_shards(config: RunConfig) -> bool:
    """Whether rollout, reward and evaluations run as Ray tasks. auto: on a joined cluster, if nothing needs the driver."""
    runner = config.placement.task_runner
    if runner == "auto":
        return config.placement.ray_address is not None and not not_in_shards(config)
    return runner == "ray"
