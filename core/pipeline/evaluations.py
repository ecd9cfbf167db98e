"""Which evaluations a run waits for."""

from __future__ import annotations

from millrace.core.config import RunConfig
from millrace.core.retention import due


def evaluates_after(config: RunConfig, done: int) -> bool:
    """Whether the weights of so many iterations are evaluated before the run goes on, or ends."""
    e = config.evaluation
    is_due = due(done, e.every) and not config.evaluates_in_background
    return bool(e.sets) and (is_due or done == config.run.iterations)
