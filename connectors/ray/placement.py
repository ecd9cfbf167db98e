"""Where a run's actors live: a named placement group, found again by a later driver, and the GPUs of each place in it.

Owns the reservation. An actor takes no resources of its own: it is made in its bundle, thus on the bundle's node, and its
environment names the GPUs that it sees. Knows nothing of what actors do.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from millrace.connectors.ray.cluster import asked
from millrace.core.config import RunConfig
from millrace.core.errors import ActorLostError, ConfigError
from millrace.core.resource_layout import ResourceLayout, resource_layout

log = logging.getLogger(__name__)
GROUP = "seats"  # its name within the run's namespace
PROBE_TIMEOUT_S = 120.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
_lock = threading.Lock()  # trainer and engines may be made at the same time


@dataclass(frozen=True)
class Place:
    """Where an actor is made, on which node it then is, and what its environment says."""

    options: dict[str, Any]
    node: str
    address: str  # of the node
    environment: dict[str, str]


class Reservation:
    """A run's part of the cluster this process has joined."""

    def __init__(self, config: RunConfig, engines: bool = True) -> None:
        self.config = config
        self._engines = engines

    @asked("no places for the run's parts")
    def places(self, role: str) -> list[Place]:
        """A place for each actor of a role; the cluster's room is reserved first unless it is already.

        Raises ConfigError if the cluster has too little of it, ActorLostError if a node dies or the cluster is left meanwhile.
        """
        with _lock:
            group, wanted = self._reserved()
        of = wanted.of[role]
        nodes = placement_group_table(group)["bundles_to_node_id"]
        addresses = _addresses()
        gpus = _gpus(
            group, {slot.bundle: wanted.bundles[slot.bundle].get("GPU", 0) for slot in of if slot.gpus}
        )
        return [
            Place(
                {"scheduling_strategy": _in(group, slot.bundle)},
                nodes[slot.bundle],
                addresses[nodes[slot.bundle]],
                {VISIBLE: ",".join(gpus[slot.bundle][number] for number in slot.gpus)},
            )
            for slot in of
        ]

    def _reserved(self) -> tuple[PlacementGroup, ResourceLayout]:
        group = _find()
        held = [] if group is None else _bundles(group)
        had_gpus = any("GPU" in bundle for bundle in held)  # they may be lost: the run does not go on without
        wanted = resource_layout(self.config, had_gpus or _cluster_has("GPU"), self._engines)
        if group is not None and held != wanted.bundles:
            log.warning("reserving again: the run needs other room than it has")
            remove_placement_group(group)
            group = None
        if group is None:
            group = placement_group(wanted.bundles, strategy="PACK", name=GROUP, lifetime="detached")
        may_grow = self.config.placement.ray_address is not None
        patience = self.config.placement.wait_s if may_grow or _ever_fits(wanted) else 0
        if not _created(group, patience):
            raise ConfigError(_no_room(self.config, wanted))
        return group, wanted


@asked("no place on this node")
def here() -> Place:
    """A place on the node of this process, with none of its GPUs. Outside the cluster: on that of Ray's client server."""
    node = ray.get_runtime_context().get_node_id()
    return Place(
        {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)},
        node,
        _addresses()[node],
        {VISIBLE: ""},
    )


@asked("the reservation cannot be given back")
def release() -> None:
    """Give this namespace's reservation back; actors in it end."""
    group = _find()
    if group is not None:
        remove_placement_group(group)


@asked("the reservation of another run cannot be given back")
def release_of(namespace: str) -> None:
    """Give the reservation of another namespace of this cluster back, if it has one."""
    found = ray._private.state.state.get_placement_group_by_name(GROUP, namespace)
    if found is not None:
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(found["placement_group_id"])))


def _addresses() -> dict[str, str]:
    """Addresses of nodes by their ids."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def _cluster_has(kind: str) -> bool:
    return bool(ray.cluster_resources().get(kind, 0) > 0)


def _find() -> PlacementGroup | None:
    try:
        group: PlacementGroup = get_placement_group(GROUP)
    except ValueError:
        return None
    return group


def _created(group: PlacementGroup, patience_s: float) -> bool:
    """Whether the group has its room in time. Asks often: Ray's own wait does not end if the cluster is left meanwhile."""
    deadline, pause = time.monotonic() + patience_s, 0.01
    while placement_group_table(group)["state"] != "CREATED":
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return True


def _bundles(group: PlacementGroup) -> list[dict[str, float]]:
    found = placement_group_table(group)["bundles"]
    return [found[number] for number in sorted(found)]


def _in(group: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def _ever_fits(wanted: ResourceLayout) -> bool:
    has = ray.cluster_resources()
    return all(bool(has.get(kind, 0) >= amount) for kind, amount in wanted.needed.items())


def _no_room(config: RunConfig, wanted: ResourceLayout) -> str:
    has, free = ray.cluster_resources(), ray.available_resources()
    alive = sum(1 for node in ray.nodes() if node["Alive"])
    amounts = " and ".join(
        f"{amount:g} {kind}s (the cluster has {has.get(kind, 0):g}, {free.get(kind, 0):g} of them free)"
        for kind, amount in wanted.needed.items()
        if amount
    )
    largest = max(max(bundle.values()) for bundle in wanted.bundles)
    together = f", {largest:g} of them on one node" if largest > 1 else ""
    return (
        f"placement: the run needs {amounts}{together}; nodes alive: {alive}, waited for: placement.wait_s = "
        f"{config.placement.wait_s:g}. Start the nodes that are missing, or lower trainer.world_size, engines.count or "
        "engines.gpus, or set placement.colocate=true on GPUs; what finished is kept"
    )


def _gpus(group: PlacementGroup, wanted: dict[int, float]) -> dict[int, list[str]]:
    """Ids of the GPUs that each bundle holds on its node, which stay the same while the bundle stays there."""
    asked = {
        bundle: _visible.options(num_gpus=amount, scheduling_strategy=_in(group, bundle)).remote()
        for bundle, amount in wanted.items()
    }
    try:
        found = ray.get(list(asked.values()), timeout=PROBE_TIMEOUT_S)
    except RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise ActorLostError(f"a node of the run does not tell its GPUs: {reason}") from None
    return dict(zip(asked, found, strict=True))


@ray.remote(num_cpus=0)
def _visible() -> list[str]:
    """The GPUs that Ray gives this task."""
    ids = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
    return sorted(ids, key=lambda gpu: (int(gpu) if gpu.isdecimal() else 0, gpu))
