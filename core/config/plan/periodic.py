"""What a run does after only some iterations, and waits for."""

from __future__ import annotations

from millrace.core.config.plan.retention import due
from millrace.core.config.run_config import RunConfig


def evaluates_after(config: RunConfig, done: int) -> bool:
    """Whether the weights of so many iterations are evaluated before the run goes on, or ends."""
    e = config.evaluation
    is_due = due(done, e.every) and not config.evaluates_in_background
    return bool(e.sets) and (is_due or done == config.run.iterations)


def saves_after(config: RunConfig, done: int) -> bool:
    """Whether a checkpoint is due after so many iterations."""
    return due(done, config.checkpoint.every) or done == config.run.iterations


def exports_after(config: RunConfig, done: int) -> bool:
    """Whether Hugging Face files are due after so many iterations."""
    every, last = config.checkpoint.export_every, done == config.run.iterations
    return bool(every and due(done, every)) or (last and config.checkpoint.export_last)
