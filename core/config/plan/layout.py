"""Where trainer and engines run."""

from __future__ import annotations

import os
from dataclasses import dataclass
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
    sequence: bool
    engine_kind: EngineKind
    engines: int
    prefill: int
    gpus_an_engine: int
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
        sequence=p.sequence,
        engine_kind=kind,
        engines=count,
        prefill=e.prefill,
        gpus_an_engine=on_gpus,
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
