"""Rules of `checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from millrace.core.config.parts.problems import Problem, nearest
from millrace.core.config.run_config import RunConfig
from millrace.core.contracts.task_records import EvaluatedSet
from millrace.core.evaluation import LOWEST_IS_BEST, powers

FIGURES = tuple(name for name in EvaluatedSet.__annotations__ if name not in ("file", "pass_at", "subsets"))


def problems(config: RunConfig) -> Iterator[Problem]:
    """Checkpoints that would never be kept."""
    yield from _keep_best(config)
    c = config.checkpoint
    if c.keep_every and c.keep_every < config.run.iterations < lcm(c.every, c.keep_every):
        yield Problem(
            "checkpoint.keep_every",
            c.keep_every,
            f"no checkpoint of the run's {config.run.iterations} iterations, one every {c.every}, divides by it",
            f"set it to a multiple of checkpoint.every, such as {c.every}",
        )


def _keep_best(config: RunConfig) -> Iterator[Problem]:
    """A metric that no evaluation makes, or that no evaluation makes at an iteration saved before the last."""
    c, e = config.checkpoint, config.evaluation
    if c.keep_best is None:
        return
    made = [
        f"eval/{held_out.name}/{figure}"
        for held_out in e.sets
        for figure in (
            LOWEST_IS_BEST
            if config.algorithm.supervised
            else (*FIGURES, *(f"pass_at_{k}" for k in powers(held_out.samples_per_prompt)))
        )
    ]
    alone = [held_out.name for held_out in e.sets if held_out.samples_per_prompt < 2]
    if c.keep_best in [f"eval/{name}/majority" for name in alone]:
        yield Problem(
            "checkpoint.keep_best",
            c.keep_best,
            "one sample a prompt has no majority",
            "set samples_per_prompt of the set to 2 or more, or keep the best by its reward_mean",
        )
    elif c.keep_best not in made:
        yield Problem(
            "checkpoint.keep_best",
            c.keep_best,
            "no evaluation of evaluation.sets makes this metric"
            + (" with algorithm.loss=sft" if config.algorithm.supervised else ""),
            nearest(c.keep_best, made) if made else "add a set to evaluation.sets, or remove it",
        )
    elif c.every < config.run.iterations <= lcm(c.every, e.every):
        yield Problem(
            "checkpoint.keep_best",
            c.keep_best,
            f"no iteration before the last is both evaluated, one every {e.every}, and saved, one every {c.every}",
            f"set evaluation.every to {c.every}, as checkpoint.every",
        )
