"""Rules of `placement`."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig
from millrace.core.sharding import INSTEAD, in_shards, not_in_shards


def problems(config: RunConfig) -> Iterator[Problem]:
    """Trainer and engines that cannot share GPUs, and runs that cannot be split into shards."""
    e = config.engines
    if config.placement.task_runner == "ray":
        for field, reason in not_in_shards(config).items():
            yield Problem(
                "placement.task_runner",
                "ray",
                f"shards cannot do {field} yet: {reason}",
                f"set it to auto or local, or {INSTEAD.get(field, f'leave {field} out')}",
            )
    elif config.rollout.shards is not None and not in_shards(config):
        yield Problem(
            "rollout.shards",
            config.rollout.shards,
            f"with placement.task_runner={config.placement.task_runner} the driver generates here",
            "leave it out, or set placement.task_runner=ray",
        )
    if not config.placement.colocate:
        return
    if not e.started:
        yield Problem(
            "placement.colocate", True, "external engines share no GPU with the trainer", "set it to false"
        )
    shared = any("ipc" in kind.transports for kind in e.kinds)
    if not shared or config.trainer.device == "cpu":
        yield Problem(
            "placement.colocate",
            True,
            "with engines.kind=embedded or trainer.device=cpu no GPUs are shared",
            "set it to false",
        )
    elif config.trainer.world_size != e.count * e.gpus:
        yield Problem(
            "trainer.world_size",
            config.trainer.world_size,
            f"the trainer shares GPUs with engines.count × engines.gpus = {e.count} × {e.gpus}",
            "make both the number of GPUs, or set placement.colocate=false",
        )
