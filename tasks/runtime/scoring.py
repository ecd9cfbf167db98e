"""The worker processes that score samples and turn rewards into advantages: started when first needed, ended with the run."""

from __future__ import annotations

import logging
from dataclasses import replace

from millrace.connectors.workers.pool import Outcome, WorkerPool
from millrace.core.config import RunConfig
from millrace.core.contracts.progress import starting
from millrace.core.contracts.references import scrubbed
from millrace.core.contracts.sample import Scorable
from millrace.core.rewards.scoring import score_sample

log = logging.getLogger(__name__)


class Scoring:
    """Scores samples by the configured reward."""

    def __init__(self, config: RunConfig) -> None:
        self._reward = config.reward
        self._pool: WorkerPool | None = None
        self._credit: WorkerPool | None = None

    async def score(self, sample: Scorable) -> Outcome:
        """Score one sample in a worker process; once more if a signal kills that, which may be no doing of the reward."""
        if self._pool is None:
            self._pool = WorkerPool(self._reward.workers)
            with starting(log, f"scoring workers ({self._reward.workers})"):
                await self._pool.warm()
        reward = self._reward
        outcome = await self._pool.call(
            score_sample, reward.function, reward.options, sample, timeout_s=reward.timeout_s, again=1
        )
        reason = outcome.reason
        if outcome.kind == "timed_out":
            reason = f"{reason} (reward.timeout_s)"
        return replace(outcome, reason=scrubbed(reason, reward.options) if reason else None)  # it is stored

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
