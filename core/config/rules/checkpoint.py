"""Rules of `checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """Checkpoints that would never be kept."""
    c = config.checkpoint
    if c.keep_every and c.keep_every < config.run.iterations < lcm(c.every, c.keep_every):
        yield Problem(
            "checkpoint.keep_every",
            c.keep_every,
            f"no checkpoint of the run's {config.run.iterations} iterations, one every {c.every}, divides by it",
            f"set it to a multiple of checkpoint.every, such as {c.every}",
        )
