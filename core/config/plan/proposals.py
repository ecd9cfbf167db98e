"""Layouts of the trainer for a number of GPUs: which fit, with their memory by part, and why the others do not. Pure.

A layout is the split of the model; the other settings are the configuration's. `trainer.recompute` is raised where only that fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from millrace.core.config import layout_rules, trainer_rules
from millrace.core.config.megatron_options import stages
from millrace.core.config.model_preset import GPUS_A_HOST
from millrace.core.config.parts.problems import Problem
from millrace.core.config.plan.memory import MemoryPart, trainer_memory
from millrace.core.config.plan.preset_memory import USED
from millrace.core.config.run_config import RunConfig
from millrace.core.config.trainer import Parallel
from millrace.core.families.architecture import Architecture

RECOMPUTE = ("none", "selective", "full")
AXES = ("tensor", "pipeline", "expert")  # which are proposed; others are as configured


@dataclass(frozen=True)
class Proposal:
    """A layout, with the memory of its fullest rank by part. fits: whether that is in a GPU."""

    config: RunConfig
    parts: list[MemoryPart]
    fits: bool

    @property
    def size(self) -> int:
        """Bytes of the fullest rank."""
        return sum(part.size for part in self.parts)

    @property
    def _order(self) -> tuple[int, ...]:
        """Less recomputation first, then fewer ranks to a model, then fewer stages: less is sent, and less waits."""
        trainer = self.config.trainer
        p = trainer.parallel
        ranks = p.pipeline * max(p.tensor * p.context, p.expert * p.tensor_of_experts)
        return RECOMPUTE.index(trainer.recompute), ranks, p.pipeline, p.tensor


@dataclass(frozen=True)
class Proposals:
    """Layouts for so many GPUs of so many bytes, the best first; and of others how many there are by reason."""

    gpus: int
    gpu_bytes: int
    fit: list[Proposal]
    too_large: list[Proposal]  # the nearest first
    undivided: dict[str, list[str]]  # sizes that do not divide, by reason


def proposals(config: RunConfig, shape: Architecture, gpus: int, gpu_bytes: int) -> Proposals:
    """The layouts for a model of this shape on so many GPUs, each of which has so many bytes."""
    tried: list[Proposal] = []
    undivided: dict[str, list[str]] = {}
    for parallel in _layouts(config, shape, gpus):
        for recompute in RECOMPUTE[RECOMPUTE.index(config.trainer.recompute) :]:
            made = _with(config, gpus, parallel, recompute)
            wrong = next(_problems(made, shape), None)
            if wrong is not None:
                named = undivided.setdefault(wrong.reason, [])
                value = f"{wrong.field.removeprefix('trainer.parallel.')} {wrong.value}"
                named += [value] if value not in named else []
                break
            parts = trainer_memory(made, shape)
            fits = sum(part.size for part in parts) <= USED * gpu_bytes
            if fits or recompute == RECOMPUTE[-1]:
                tried.append(Proposal(made, parts, fits))
                break
    fit = sorted((each for each in tried if each.fits), key=lambda each: each._order)
    large = sorted((each for each in tried if not each.fits), key=lambda each: each.size)
    return Proposals(gpus, gpu_bytes, fit, large, undivided)


def _layouts(config: RunConfig, shape: Architecture, gpus: int) -> Iterator[Parallel]:
    """Every split of the GPUs into powers of two, and the configured one."""
    now = config.trainer.parallel
    sizes = [2**power for power in range(gpus.bit_length()) if 2**power <= gpus]
    hosts = gpus if config.placement.tensor_over_hosts else GPUS_A_HOST
    splits = product(
        sorted({size for size in sizes if size <= hosts} | {now.tensor}),
        sorted({*sizes, now.pipeline}),
        sorted({*sizes, now.expert}) if shape.experts else [now.expert],
    )
    for tensor, pipeline, expert in splits:
        if tensor * pipeline * now.context <= gpus and expert * pipeline <= gpus:
            changes = dict(zip(AXES, (tensor, pipeline, expert), strict=True))
            virtual = now.virtual if pipeline > 1 else 1
            yield now.model_copy(update={**changes, "virtual": virtual, "sequence": tensor > 1})


def _with(config: RunConfig, gpus: int, parallel: Parallel, recompute: str) -> RunConfig:
    t = config.trainer
    options = t.megatron
    if (
        parallel.pipeline != t.parallel.pipeline
    ):  # what divides the layers divides them over the configured stages
        options = {name: value for name, value in options.items() if name not in stages.OPTIONS}
    changes = {"world_size": gpus, "parallel": parallel, "recompute": recompute, "megatron": options}
    return config.model_copy(update={"trainer": t.model_copy(update=changes)})


def _problems(config: RunConfig, shape: Architecture) -> Iterator[Problem]:
    yield from layout_rules.problems(config, shape)
    yield from trainer_rules.layout_problems(config)
