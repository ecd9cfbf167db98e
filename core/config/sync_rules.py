"""Rules of `sync`."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig
from millrace.core.config.storage_rules import memory_only


def problems(config: RunConfig) -> Iterator[Problem]:
    """Transports that trainer and engines do not share."""
    colocate, e = config.placement.colocate, config.engines
    yield from memory_only("sync.directory", config.sync.directory)
    if config.sync.kind == "ipc" and not colocate:
        yield Problem(
            "sync.kind",
            "ipc",
            "GPU memory is shared within one GPU only",
            "set it to broadcast or disk, or set placement.colocate=true",
        )
    yield from _compared(config)
    if config.sync.kind != "broadcast":
        return
    if colocate:
        yield Problem(
            "sync.kind",
            "broadcast",
            "placement.colocate shares GPUs, and NCCL joins none to a group twice",
            "set it to ipc or disk",
        )
    on_cpu = all(kind.runs_on == "cpu" for kind in e.kinds)
    if e.started and on_cpu != (config.trainer.device == "cpu"):
        yield Problem(
            "sync.kind",
            "broadcast",
            f"trainer.device={config.trainer.device} and engines.kind={e.kind} may have no transport in common",
            "set trainer.device=cuda and engines.kind=sglang, or trainer.device=cpu and engines.kind=embedded, or disk",
        )


def _compared(config: RunConfig) -> Iterator[Problem]:
    """A comparison of engines and trainer that is meaningless: engines score prompts at temperature 1 only."""
    gap, temperature = config.sync.max_prompt_gap, config.rollout.sampling.temperature
    if gap is None:
        return
    if temperature != 1:
        yield Problem(
            "sync.max_prompt_gap",
            gap,
            f"engines score prompts at temperature 1, and the trainer at rollout.sampling.temperature = {temperature:g}",
            "set it to null, or rollout.sampling.temperature=1",
        )
    if config.engines.prefill:
        yield Problem(
            "sync.max_prompt_gap",
            gap,
            "engines that only prefill, or only decode, answer no request alone",
            "set it to null, or leave engines.prefill out",
        )
