"""Where trainer and engines run, and which part of a cluster each rank and each engine gets. Pure.

Owns how GPUs and CPUs are bundled: a bundle lies on one node. It holds the GPUs that an engine has on one of engines.nodes, or
of one tensor parallel group, of which placement.tensor_over_hosts makes a bundle of each GPU.
If trainer and engines share GPUs, it holds both, so that they stay together on any node.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path

from millrace.core.config.engine_kinds import EngineKind
from millrace.core.config.run_config import RunConfig
from millrace.core.sharding import in_shards, not_in_shards


@dataclass(frozen=True)
class Layout:
    """Where trainer and engines run."""

    device: str
    world_size: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    replicate: int
    sequence: bool
    engine_kind: EngineKind
    engines: int
    prefill: int
    gpus_an_engine: int
    nodes_an_engine: int
    gpus: int
    placement: str
    sync: str
    rollout: str  # how samples are generated and scored


def layout_of(config: RunConfig, gpus: int) -> Layout:
    """The layout on a host with this many GPUs."""
    p, e = config.trainer.parallel, config.engines
    cuda = config.trainer.device == "cuda" or (config.trainer.device == "auto" and gpus > 0)
    kind = e.kind_at(gpus)
    count = e.count if config.generates else 0
    ranks = 0 if config.pipeline.rollouts_only else config.trainer.world_size
    on_gpus = e.gpus if kind.runs_on == "gpu" else 0
    return Layout(
        device="cuda" if cuda else "cpu",
        world_size=ranks,
        tensor=p.tensor,
        pipeline=p.pipeline,
        context=p.context,
        expert=p.expert,
        data=config.data_parallel,
        replicate=p.replicate,
        sequence=p.sequence,
        engine_kind=kind,
        engines=count,
        prefill=e.prefill,
        gpus_an_engine=on_gpus,
        nodes_an_engine=e.nodes if on_gpus else 1,
        gpus=count * on_gpus + (ranks if cuda and not config.placement.colocate else 0),
        placement=config.placement.ray_address or "a Ray head on this host",
        sync=config.sync_kind,
        rollout=_rollout(config),
    )


def _rollout(config: RunConfig) -> str:
    if not in_shards(config):
        needs = not_in_shards(config) if config.placement.ray_address else {}
        because = f", which {next(iter(needs))} needs" if needs else ""
        return f"by the driver{because}"
    count = config.rollout.shards
    shards = "in a shard for each node with engines" if count is None else f"in {count} shards"
    return f"{shards}, as Ray tasks; reward.workers = {config.reward.workers} in each"


def visible_gpus() -> int:
    """GPUs this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


@dataclass(frozen=True)
class Slot:
    """One actor's place: a bundle, and which of the bundle's GPUs."""

    bundle: int
    gpus: range


@dataclass(frozen=True)
class ResourceLayout:
    """The resources that a run reserves, and each actor's place in them."""

    bundles: list[dict[str, float]]
    of: Mapping[str, list[Slot]]

    @property
    def needed(self) -> dict[str, float]:
        """Sum of all bundles."""
        return {kind: sum(bundle.get(kind, 0) for bundle in self.bundles) for kind in ("CPU", "GPU")}


def resource_layout(config: RunConfig, gpus: bool, engines: bool = True) -> ResourceLayout:
    """The layout of a run on a cluster that has `gpus` or none; without `engines`, of its trainer alone."""
    t, e = config.trainer, config.engines
    on_gpu = t.device == "cuda" or config.placement.colocate or (t.device == "auto" and gpus)
    served = engines and e.started and config.generates
    engine_gpus = e.gpus if gpus and e.kind_at(1).runs_on == "gpu" else 0
    ranks = 0 if config.pipeline.rollouts_only else t.world_size
    group = 1 if config.placement.tensor_over_hosts else t.parallel.tensor
    if config.placement.colocate:
        size = lcm(group, e.gpus // e.nodes)
        parts = _row(e.count * e.nodes, e.gpus // e.nodes, size) if served else []
        return ResourceLayout(
            _bundles(t.world_size, size, on_gpu),
            {"trainer": _row(t.world_size, 1, size), **_of_engines(parts, e.nodes)},
        )
    trainer = _bundles(ranks, group, on_gpu)
    nodes = e.nodes if engine_gpus else 1
    each = max(1, engine_gpus // nodes)
    serving = _bundles(e.count * nodes * each, each, engine_gpus > 0) if served else []
    parts = [Slot(len(trainer) + i, range(engine_gpus // nodes)) for i in range(len(serving))]
    return ResourceLayout(
        trainer + serving,
        {"trainer": _row(ranks, 1 if on_gpu else 0, group), **_of_engines(parts, nodes)},
    )


def _of_engines(parts: list[Slot], nodes: int) -> dict[str, list[Slot]]:
    """The slots of engines, whose servers answer requests, and of their processes on further nodes. parts: engine by engine."""
    return {
        "engine": parts[::nodes],
        "engine_node": [slot for number, slot in enumerate(parts) if number % nodes],
    }


def _bundles(slots: int, size: int, on_gpu: bool) -> list[dict[str, float]]:
    return [{"CPU": size, **({"GPU": size} if on_gpu else {})} for _ in range(slots // size)]


def _row(count: int, gpus: int, size: int) -> list[Slot]:
    """Slots of actors with `gpus` GPUs each, one after the other in bundles of `size`; without GPUs, one actor a bundle."""
    firsts = [index * max(1, gpus) for index in range(count)]
    return [Slot(first // size, range(first % size, first % size + gpus)) for first in firsts]
