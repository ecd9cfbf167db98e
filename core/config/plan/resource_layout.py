"""Which part of a cluster each trainer rank and each engine gets.

Owns how GPUs and CPUs are bundled: a bundle lies on one node. It holds the GPUs of an engine or of one tensor parallel group.
If trainer and engines share GPUs, it holds both, so that they stay together on any node. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from millrace.core.config import RunConfig


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
    if config.placement.colocate:
        size = lcm(t.parallel.tensor, e.gpus)
        return ResourceLayout(
            _bundles(t.world_size, size, on_gpu),
            {
                "trainer": _row(t.world_size, 1, size),
                "engine": _row(e.count, e.gpus, size) if served else [],
            },
        )
    group = t.parallel.tensor
    trainer = _bundles(ranks, group, on_gpu)
    each = max(1, engine_gpus)
    serving = _bundles(e.count * each, each, engine_gpus > 0) if served else []
    return ResourceLayout(
        trainer + serving,
        {
            "trainer": _row(ranks, 1 if on_gpu else 0, group),
            "engine": [Slot(len(trainer) + i, range(engine_gpus)) for i in range(len(serving))],
        },
    )


def _bundles(slots: int, size: int, on_gpu: bool) -> list[dict[str, float]]:
    return [{"CPU": size, **({"GPU": size} if on_gpu else {})} for _ in range(slots // size)]


def _row(count: int, gpus: int, size: int) -> list[Slot]:
    """Slots of actors with `gpus` GPUs each, one after the other in bundles of `size`; without GPUs, one actor a bundle."""
    firsts = [index * max(1, gpus) for index in range(count)]
    return [Slot(first // size, range(first % size, first % size + gpus)) for first in firsts]
