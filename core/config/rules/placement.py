"""Rules of `placement`."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """Trainer and engines that cannot share GPUs."""
    e = config.engines
    if not config.placement.colocate:
        return
    if e.kind == "external":
        yield Problem(
            "placement.colocate", True, "external engines share no GPU with the trainer", "set it to false"
        )
    if e.kind == "embedded" or config.trainer.device == "cpu":
        yield Problem("placement.colocate", True, "without GPUs there is nothing to share", "set it to false")
    elif config.trainer.world_size != e.count * e.gpus:
        yield Problem(
            "trainer.world_size",
            config.trainer.world_size,
            f"the trainer shares GPUs with engines.count × engines.gpus = {e.count} × {e.gpus}",
            "make both the number of GPUs, or set placement.colocate=false",
        )
