"""Which GPUs trainer ranks and engines get. On a cluster without GPUs everything runs where there is room.

Owns placement groups; a rank or an engine sees its GPUs through its actor's options.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.errors import ConfigError


def cluster_gpus() -> int:
    """GPUs of the cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def reserve(name: str, bundles: int, gpus_each: float, timeout_s: float = 120) -> PlacementGroup:
    """A detached placement group of equal bundles, packed on as few nodes as possible; found again by name.

    Raises ConfigError if the cluster has not that many free GPUs.
    """
    try:
        group = get_placement_group(name)
    except ValueError:
        group = placement_group(
            [{"GPU": gpus_each, "CPU": 1}] * bundles, strategy="PACK", name=name, lifetime="detached"
        )
    if not group.wait(timeout_s):
        raise ConfigError(
            f"placement: {bundles} bundles of {gpus_each:g} GPUs could not be had in {timeout_s:.0f} s; the cluster has "
            f"{cluster_gpus()} GPUs, {ray.available_resources().get('GPU', 0):g} of them free. Lower trainer.world_size, "
            "engines.count or engines.gpus, or set placement.colocate=true"
        )
    return group


def gpu_options(group: PlacementGroup, bundle: int, gpus: float) -> dict[str, Any]:
    """Options of an actor on a bundle's GPUs."""
    return {
        "num_gpus": gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }
