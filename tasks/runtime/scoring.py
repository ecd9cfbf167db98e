"""The worker processes that score samples and turn rewards into advantages: started when first needed, ended with the run."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from millrace.connectors.user_code.pool import Outcome, WorkerPool
from millrace.connectors.user_code.process import Limits
from millrace.core.config import RunConfig, UserFunction
from millrace.core.config.reward import RewardFunction
from millrace.core.contracts.progress import starting
from millrace.core.contracts.references import scrubbed
from millrace.core.contracts.sample import Scorable
from millrace.core.hooks.reward_selection import Selected, own_rewards, select
from millrace.core.rewards.scoring import hint_of, score_group, score_sample
from millrace.tasks.scoring.scoring_batches import Item, ScoringBatches

log = logging.getLogger(__name__)


class Scoring:
    """Scores samples by the configured rewards."""

    def __init__(self, config: RunConfig) -> None:
        self._reward = config.reward
        self.of_sources, self.of_sets = own_rewards(config)  # rewards that sources and held-out sets name
        self._pool: WorkerPool | None = None
        self._credit: WorkerPool | None = None
        self._batches: ScoringBatches | None = None

    def selected(self, sample: Scorable, own: Selected | None) -> Selected:
        """The reward of a sample. own: the reward of its source or set. Errors: UnknownRewardError."""
        metadata = json.loads(sample["metadata"]) if self._reward.named and sample["metadata"] else {}
        return select(self._reward, own, metadata)

    async def score(self, selected: Selected, item: Item) -> Outcome:
        """Score a sample, or the samples of a prompt in one call, in a worker process.

        It is done once more if a signal kills the process, since the reward may not be the cause.
        """
        if self._reward.concurrency == 1:
            return self._explained(await self._alone(selected, item), selected)
        pool, reward = await self._started(), self._reward
        # no await after this: calls that come together share the batches
        if self._batches is None:
            self._batches = ScoringBatches(
                pool, reward.workers, reward.concurrency, reward.timeout_s, self._alone
            )
        return self._explained(await self._batches.score(selected, item), selected)

    async def _alone(self, selected: Selected, item: Item) -> Outcome:
        return await self._called(score_group if isinstance(item, list) else score_sample, selected, item)

    async def _started(self) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(
                self._reward.workers, Limits(self._reward.memory_mb, self._reward.max_processes)
            )
            with starting(log, f"scoring workers ({self._reward.workers})"):
                await self._pool.warm()
        return self._pool

    async def hint(self, function: UserFunction, field: str, sample: Scorable) -> Outcome:
        """The function's hint to a teacher about a sample, made in a worker process under the limits of rewards."""
        selected = Selected(field, RewardFunction(**function.model_dump()))
        return self._explained(await self._called(hint_of, selected, sample), selected)

    async def _called(self, score: Callable[..., Any], selected: Selected, scored: Any) -> Outcome:
        pool, function, timeout_s = await self._started(), selected.function, self._reward.timeout_s
        return await pool.call(
            score, function.function, function.options, scored, selected.field, timeout_s=timeout_s, again=1
        )

    def _explained(self, outcome: Outcome, selected: Selected) -> Outcome:
        """The outcome with a reason that names the field of a deadline and holds no secret, since it is stored."""
        reason = outcome.reason
        if outcome.kind == "timed_out":
            reason = f"{reason} (reward.timeout_s)"
        options = selected.function.options
        return replace(outcome, reason=scrubbed(reason, options) if reason else None)

    @property
    def credit_worker(self) -> WorkerPool:
        """The one process that shapes rewards and computes advantages; it loads torch, and this process does not."""
        if self._credit is None:
            self._credit = WorkerPool(1)
        return self._credit

    def close(self) -> None:
        """End the processes."""
        for pool in (self._pool, self._credit):
            if pool:
                pool.close()
