"""An optimizer step in chunks: a chunk's passes run as soon as its groups are complete, while others are still generated.

Gradients of chunks add up in the model's buffers, undivided and not reduced over ranks, in the order of the chunks. The passes
of the last chunk reduce them; then they are divided by the denominator of the whole step's loss. Early passes are a cache: the
step is made from the committed batch, chunk by chunk, and an early pass counts only if its rows are the batch's. So a step has
the same bits for any number of early chunks. Knows nothing of held versions, files or actors.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch.distributed as dist

from millrace.connectors.trainers.comparison import sample_logprobs
from millrace.connectors.trainers.learner import Learner, step_metrics
from millrace.connectors.trainers.packing import BatchRow, oldest_age
from millrace.connectors.trainers.passes import MetricSums
from millrace.connectors.trainers.policy_step import policy_step
from millrace.connectors.trainers.rank_batch import RankBatch, counted
from millrace.core.contracts.sample import SampleLogprobs

log = logging.getLogger(__name__)


@dataclass
class _Passed:
    """The chunks whose gradients are in the model's buffers."""

    version: int  # the version that the step makes
    hashes: list[str] = field(default_factory=list)  # one per chunk, of its rows
    sums: MetricSums = field(default_factory=dict)  # this rank's
    packs: list[int] = field(default_factory=list)  # tokens of each of this rank's packs
    logprobs: list[SampleLogprobs] = field(default_factory=list)  # this rank's, if they are stored


class Chunks:
    """One rank's step in chunks. Every rank calls every method, with the same rows."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._passed: _Passed | None = None

    def drop(self) -> None:
        """Forget all passes. Called before anything else uses the gradient buffers."""
        self._passed = None

    def add(self, version: int, number: int, rows: Sequence[BatchRow]) -> int:
        """Run the passes of chunk `number`, from 0, of the step to `version`; returns the number of chunks held afterwards.

        A held chunk is not passed again. If an earlier chunk is missing, does nothing: the caller continues with the first missing
        chunk.
        """
        oldest = oldest_age(rows)
        held = self._agreed(version)
        digest = hash_of(rows, oldest)
        if number < len(held) and held[number] != digest:
            log.warning(
                "chunk %d of step %d has other rows than its passes: all passes run again", number, version
            )
            self.drop()
            held = []
        if number != len(held):
            return len(held)
        passed = self._take(version)
        with self._learner.policy.accumulating():
            self._pass(passed, rows, oldest, lambda: None)
        passed.hashes.append(digest)
        self._passed = passed
        return len(passed.hashes)

    def finish(
        self, version: int, chunks: Sequence[Sequence[BatchRow]]
    ) -> tuple[dict[str, float], list[int], list[SampleLogprobs]]:
        """Leave the step's gradients in the model's buffers; returns its metrics over all ranks, and the tokens of this rank's packs.

        With trainer.store_logprobs also returns the log-probabilities that this rank writes. chunks: the rows of the whole step.
        Afterwards no chunk is held.
        """
        every = [*chain.from_iterable(chunks)]
        oldest, held = oldest_age(every), self._agreed(version)
        if len(held) >= len(chunks) or held != [hash_of(rows, oldest) for rows in chunks[: len(held)]]:
            log.warning(
                "%d chunks of step %d were passed of other rows than the batch's: dropped", len(held), version
            )
            self.drop()
            held = []
        passed = self._take(version)
        policy, denominator = self._learner.policy, self._learner.objective.denominator(*counted(every))
        with policy.accumulating():
            for rows in chunks[len(held) : -1]:
                self._pass(passed, rows, oldest, lambda: None)

        def divide() -> None:
            policy.divide_gradient(denominator)
            policy.measure_gradient()

        self._pass(passed, chunks[-1], oldest, divide)
        if "loss" in passed.sums:  # a plain sum; other metrics have separate weights
            loss, weight = passed.sums["loss"]
            passed.sums["loss"] = loss / denominator, weight
        return step_metrics(self._learner.objective, passed.sums), passed.packs, passed.logprobs

    def _agreed(self, version: int) -> list[str]:
        """Hashes of a step's chunks that all ranks hold. If ranks differ, for example after an error on one, all drop theirs."""
        passed = self._passed if self._passed and self._passed.version == version else None
        ours: list[str] = passed.hashes if passed else []
        everywhere: list[Any] = [ours] * dist.get_world_size()
        if len(everywhere) > 1:
            dist.all_gather_object(everywhere, ours)
        if passed is None or any(theirs != ours for theirs in everywhere):
            self.drop()
            return []
        return ours

    def _take(self, version: int) -> _Passed:
        """Take the held chunks to add one. During that none is held, so an error drops all. Without any, gradients start from zero."""
        passed, self._passed = self._passed, None
        if passed is None:
            self._learner.policy.zero_grad()
            self._learner.objective.kl_coef = self._learner.kl_controller.value
            passed = _Passed(version)
        return passed

    def _pass(
        self, passed: _Passed, rows: Sequence[BatchRow], oldest: int, on_launched: Callable[[], None]
    ) -> None:
        """Forward and backward passes of a chunk."""
        learner = self._learner
        batch: RankBatch = learner.chunk_batch(rows, oldest)
        policy_step(
            learner.passes, learner.objective, batch, passed.sums, forward_only=False, on_launched=on_launched
        )
        passed.packs += [pack.tokens for pack in batch.packs]
        if learner.config.trainer.store_logprobs:
            passed.logprobs += sample_logprobs(batch, learner.place)


def hash_of(rows: Sequence[BatchRow], oldest: int) -> str:
    """Hash of all values that the passes of these rows read. oldest: largest age of a token in the iteration."""
    digest = hashlib.sha256(str(oldest).encode())
    for row in rows:
        plain = (
            row.sample_id,
            row.response_length,
            row.advantage,
            row.reward,
            row.shaped_reward,
            row.train_step,
        )
        digest.update(repr(plain).encode())
        digest.update(b"-" if row.routed is None else row.routed)
        for values in (row.tokens, row.loss_mask, row.rollout_logprobs, row.ages):
            digest.update(
                b"-" if values is None else f"{values.shape}{values.dtype}".encode() + values.tobytes()
            )
    return digest.hexdigest()
