"""Places a run's actors: a named placement group, found again by a later driver, and the GPUs of each place in it.

Owns the reservation. An actor requests no resources: it is created in its bundle, so on the bundle's node, and its environment
names the GPUs that it sees. Knows nothing of what actors do.
"""

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
from millrace.core.config.plan.layout import ResourceLayout, resource_layout
from millrace.core.errors import ActorLostError, ConfigError

log = logging.getLogger(__name__)
GROUP = "seats"  # its name within the run's namespace
PROBE_TIMEOUT_S = 120.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
_lock = threading.Lock()  # trainer and engines may be created at the same time


@dataclass(frozen=True)
class ActorPlacement:
    """The place of an actor: Ray's options, its node, and its environment variables."""

    options: dict[str, Any]
    node: str
    address: str  # the node's
    environment: dict[str, str]


class Reservation:
    """The part of the joined cluster that is reserved for a run."""

    def __init__(self, config: RunConfig, engines: bool = True) -> None:
        self.config = config
        self._engines = engines

    @asked("no places for the run's parts")
    def places(self, role: str) -> list[ActorPlacement]:
        """A place for each actor of a role. The first call reserves room in the cluster.

        Raises ConfigError if the cluster has too little room, ActorLostError if a node dies or this process leaves the cluster.
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
            ActorPlacement(
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
        # a run that had GPUs waits for GPUs, even if the cluster has lost all of them
        had_gpus = any("GPU" in bundle for bundle in held)
        wanted = resource_layout(self.config, had_gpus or _cluster_has("GPU"), self._engines)
        if group is not None and held != wanted.bundles:
            log.warning("reserving again: the run needs other resources than it holds")
            remove_placement_group(group)
            group = None
        _check_hosts(self.config, wanted)
        if group is None:
            group = placement_group(wanted.bundles, strategy="PACK", name=GROUP, lifetime="detached")
        may_grow = self.config.placement.ray_address is not None
        patience = self.config.placement.wait_s if may_grow or _ever_fits(wanted) else 0
        if not _created(group, patience):
            raise ConfigError(_no_room(self.config, wanted))
        return group, wanted


@asked("no place on this node")
def here() -> ActorPlacement:
    """A place on this process's node, without GPUs. For a process outside the cluster, on the node of Ray's client server."""
    node = ray.get_runtime_context().get_node_id()
    return ActorPlacement(
        {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)},
        node,
        _addresses()[node],
        {VISIBLE: ""},
    )


@asked("the reservation cannot be given back")
def release() -> None:
    """Release this namespace's reservation; actors in it end."""
    group = _find()
    if group is not None:
        remove_placement_group(group)


@asked("the reservation of another run cannot be given back")
def release_of(namespace: str) -> None:
    """Release the reservation of another namespace of this cluster, if it has one."""
    found = ray._private.state.state.get_placement_group_by_name(GROUP, namespace)
    if found is not None:
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(found["placement_group_id"])))


def _addresses() -> dict[str, str]:
    """Addresses of nodes by id."""
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
    """Whether the group gets its room in time. Polls, since Ray's own wait does not end if this process leaves the cluster."""
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


def _check_hosts(config: RunConfig, wanted: ResourceLayout) -> None:
    """Raise ConfigError if no host has the GPUs of a tensor parallel group. Hosts without GPUs say nothing: others may come."""
    tensor, over_hosts = config.trainer.parallel.tensor, config.placement.tensor_over_hosts
    largest = max((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if not wanted.needed["GPU"] or not largest:
        return
    e = config.engines
    if max((len(slot.gpus) for slot in wanted.of["engine"]), default=0) > largest:
        fit = next(
            nodes for nodes in range(1, e.gpus + 1) if e.gpus % nodes == 0 and e.gpus // nodes <= largest
        )
        raise ConfigError(
            f"an engine has {e.gpus // e.nodes} of its GPUs on each of engines.nodes = {e.nodes}, and the largest host has "
            f"{largest:g} GPUs",
            where=f"engines.gpus = {e.gpus}",
            remedy=f"lower it, or set engines.nodes={fit} and placement.tensor_over_hosts=true",
        )
    if not over_hosts and largest < tensor:
        raise ConfigError(
            f"the ranks of a tensor parallel group are on one host, and the largest has {largest:g} GPUs",
            where=f"trainer.parallel.tensor = {tensor}",
            remedy="lower it and raise trainer.parallel.pipeline, or set placement.tensor_over_hosts=true",
        )


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
    """Ids of the GPUs of each bundle on its node. They do not change while the bundle stays on the node."""
    asked = {
        bundle: _visible.options(num_gpus=amount, scheduling_strategy=_in(group, bundle)).remote()
        for bundle, amount in wanted.items()
    }
    try:
        found = ray.get(list(asked.values()), timeout=PROBE_TIMEOUT_S)
    except RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise ActorLostError(f"a node of the run does not report its GPUs: {reason}") from None
    return dict(zip(asked, found, strict=True))


@ray.remote(num_cpus=0)
def _visible() -> list[str]:
    """The GPUs that Ray assigns to this task."""
    ids = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
    return sorted(ids, key=lambda gpu: (int(gpu) if gpu.isdecimal() else 0, gpu))
