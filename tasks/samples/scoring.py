"""Scoring one sample in a worker process, for reward and evaluate alike.

A sample whose generation or scoring failed has no reward and says why: that is not a zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from millrace.core.contracts.sample import Figures, Scorable, Scoring
from millrace.tasks.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Score:
    """What scoring made of a sample. `reward` is None unless it was scored; `reason` says why it was not."""

    scoring: Scoring
    reward: float | None = None
    parts: Figures = field(default_factory=list)
    reason: str | None = None
    seconds: float = 0.0


async def score(runtime: Runtime, sample: Scorable) -> Score:
    """Score a sample, unless there is nothing to score."""
    if sample["status"] in ("failed", "aborted"):
        return Score("skipped")
    given = sample["session_reward"]
    if given is not None:  # the rollout scored itself
        return Score("scored", given, list(sample["session_parts"] or ()))
    started = time.perf_counter()
    outcome = await runtime.scoring.score(sample)
    seconds = time.perf_counter() - started
    if outcome.kind == "done":
        parts = list(outcome.value["parts"].items())
        return Score("scored", outcome.value["reward"], parts, None, seconds)
    scoring: Scoring = "timed_out" if outcome.kind == "timed_out" else "failed"
    return Score(scoring, reason=outcome.reason, seconds=seconds)
