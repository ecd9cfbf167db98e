"""The worker processes that score samples and turn rewards into advantages: started when first needed, ended with the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millrace.connectors.workers.pool import Outcome, WorkerPool
from millrace.connectors.workers.process import Limits
from millrace.core.config import RunConfig
from millrace.core.contracts.progress import starting
from millrace.core.contracts.references import scrubbed
from millrace.core.contracts.sample import Scorable
from millrace.core.rewards.scoring import score_group, score_sample
from millrace.core.rewards.selection import Selected, own_rewards, select

log = logging.getLogger(__name__)


class Scoring:
    """Scores samples by the configured rewards."""

    def __init__(self, config: RunConfig) -> None:
        self._reward = config.reward
        self._of_sources, self._of_sets = own_rewards(config)
        self._pool: WorkerPool | None = None
        self._credit: WorkerPool | None = None

    def of_source(self, name: str) -> Selected | None:
        """The reward that a source has of its own."""
        return self._of_sources.get(name)

    def of_set(self, name: str) -> Selected | None:
        """The reward that a held-out set has of its own."""
        return self._of_sets.get(name)

    def selected(self, sample: Scorable, own: Selected | None) -> Selected:
        """The reward of a sample. own: that of its source or set. Errors: UnknownRewardError."""
        metadata = json.loads(sample["metadata"]) if self._reward.named and sample["metadata"] else {}
        return select(self._reward, own, metadata)

    async def score(self, selected: Selected, sample: Scorable) -> Outcome:
        """Score one sample in a worker process; once more if a signal kills that, which may be no doing of the reward."""
        return await self._call(score_sample, selected, sample)

    async def score_group(self, selected: Selected, samples: Sequence[Scorable]) -> Outcome:
        """The same for the samples of a prompt, in one call."""
        return await self._call(score_group, selected, list(samples))

    async def _call(self, score: Callable[..., Any], selected: Selected, scored: Any) -> Outcome:
        if self._pool is None:
            self._pool = WorkerPool(
                self._reward.workers, Limits(self._reward.memory_mb, self._reward.max_processes)
            )
            with starting(log, f"scoring workers ({self._reward.workers})"):
                await self._pool.warm()
        function, timeout_s = selected.function, self._reward.timeout_s
        outcome = await self._pool.call(
            score, function.function, function.options, scored, selected.field, timeout_s=timeout_s, again=1
        )
        reason = outcome.reason
        if outcome.kind == "timed_out":
            reason = f"{reason} (reward.timeout_s)"
        return replace(outcome, reason=scrubbed(reason, function.options) if reason else None)  # it is stored

    @property
    def credit_worker(self) -> WorkerPool:
        """The one process that shapes rewards and computes advantages; it holds torch, which this process does not load."""
        if self._credit is None:
            self._credit = WorkerPool(1)
        return self._credit

    def close(self) -> None:
        """End the processes."""
        for pool in (self._pool, self._credit):
            if pool:
                pool.close()
