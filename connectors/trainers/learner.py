"""The policy and the other parts of its algorithm: critic, reference, teacher and KL coefficient.

Owns the order of computations. Values under the weights from before an iteration are computed at its first step, as are whitened
advantages, which share one scale over the iteration; all else is computed step by step. Also owns the algorithm's state in a
checkpoint. Knows nothing of files, actors or requested versions.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from millrace.connectors.trainers.critic import RankCritic, explained_variance
from millrace.connectors.trainers.frozen_models import Reference, Teacher
from millrace.connectors.trainers.packing import BatchRow, oldest_age
from millrace.connectors.trainers.passes import (
    LogprobPasses,
    MetricSums,
    add_sums,
    means_of,
    sum_over_ranks,
    to_numbers,
)
from millrace.connectors.trainers.place import RankPlace
from millrace.connectors.trainers.policy_step import logprob_gap, policy_step
from millrace.connectors.trainers.rank_batch import RankBatch, make_rank_batch
from millrace.connectors.trainers.trained_model import TrainedModel
from millrace.core.algorithms.ages import measured
from millrace.core.algorithms.credit import ScoredSamples, stored_or_shaped, token_credit
from millrace.core.algorithms.kl import KLController
from millrace.core.algorithms.objective import Objective, check_on_policy, derived
from millrace.core.config import RunConfig
from millrace.core.errors import RefusedStepError, TrainerError
from millrace.core.families.architecture import Architecture


@dataclass
class _Iteration:
    """The batches of an iteration's remaining steps."""

    batch: tuple[str, str | None]  # URL and hash of the file
    first_pass: range  # its steps; steps of later passes have the same batches
    batches: dict[int, RankBatch]  # by step

    @property
    def first_step(self) -> int:
        """The step that starts with the weights from before the iteration."""
        return self.first_pass[0]


def step_metrics(objective: Objective, sums: MetricSums) -> dict[str, float]:
    """A step's metrics over all ranks, from this rank's sums."""
    means = measured(derived(means_of(sum_over_ranks(sums))))
    if objective.needs_ref:
        means["kl_coef"] = objective.kl_coef
    return means


def _all_or_none(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts end to end; None unless every batch has its part."""
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) else None


class Learner(ABC):
    """All models of this rank. A trainer's subclass makes them, and writes and reads their state."""

    policy: TrainedModel
    passes: LogprobPasses  # through the policy
    reference: Reference | None
    critic: RankCritic | None
    teacher: Teacher | None

    def __init__(self, config: RunConfig, shape: Architecture | None, device: Any, place: RankPlace) -> None:
        """shape: of model.path; None for a family that core.families does not know."""
        self.config = config
        self.algorithm = config.algorithm
        self.device = device
        self.place = place
        self.architecture = shape
        self.objective = Objective(self.algorithm)
        self.kl_controller = KLController(self.algorithm)
        self._iteration: _Iteration | None = None
        self._make_batch = partial(
            make_rank_batch,
            objective=self.objective,
            config=config,
            architecture=shape,
            device=device,
            place=place,
        )

    def _share_clock(self) -> None:
        """Have all models' passes counted together."""
        for other in (self.critic, self.teacher):
            if other is not None:
                other.passes.clock = self.passes.clock

    @property
    def temperature(self) -> float:
        """Of the distribution whose log-probabilities are trained."""
        return 1.0 if self.objective.supervised else self.config.rollout.sampling.temperature

    def _needs_old(self, steps: int) -> bool:
        """Whether the trainer's log-probabilities from before the iteration need a forward pass."""
        a, o = self.algorithm, self.objective
        if o.supervised or o.ratio_to_rollout:
            return False
        in_advantage = a.distils_in_advantage or (a.kl_placement == "reward" and o.needs_ref)
        return in_advantage or (o.needs_old and (steps > 1 or o.needs_recompute))

    # the batches of an iteration

    def rank_batch(
        self, version: int, batch_url: str, rows: Sequence[BatchRow], batch_sha256: str | None = None
    ) -> RankBatch:
        """This rank's part of step `version`, with all per-token values except advantages. `rows`: the whole iteration's.

        batch_sha256: the file's hash, since another batch may be written to its URL.
        A refused step's values are kept for its next try. Raises TrainerError, on every rank, if a later step asks for values
        under the weights from before the iteration, or a sample has a token that the teacher does not know.
        """
        if self._iteration is None or self._iteration.batch != (batch_url, batch_sha256):
            if self.teacher is not None:
                self.teacher.check_tokens(rows)
            batches = self._start_iteration(version, batch_url, rows)
            steps = [row.train_step for row in rows]
            first_pass = range(min(steps), max(steps) + 1)
            self._iteration = _Iteration((batch_url, batch_sha256), first_pass, batches)
        batch = self._iteration.batches[version]
        self._ask_reference(batch)
        self._ask_teacher(batch)
        return batch

    def _ask_reference(self, batch: RankBatch) -> None:
        if self.reference is not None and "ref" not in batch.computed:
            with self.reference.as_policy(), self.passes.own_routing():
                batch.set_per_token("ref", self.passes.logprobs(batch.packs))

    def _ask_teacher(self, batch: RankBatch) -> None:
        if self.teacher is not None and "teacher" not in batch.computed:
            batch.set_per_token("teacher", self.teacher.logprobs(batch))

    def _start_iteration(
        self, version: int, batch_url: str, rows: Sequence[BatchRow]
    ) -> dict[int, RankBatch]:
        """Batches from step `version` on, with all values under the weights from before the iteration."""
        steps, passes = sorted({row.train_step for row in rows}), self.config.trainer.passes
        old = self._needs_old(len(steps) * passes)
        # If the engine's log-probabilities serve as old ones, no other pass computes the trainer's before the first update, for the
        # comparison of both; at a later step the weights have changed since sampling
        sampled = self.objective.ratio_to_rollout and len(steps) * passes > 1 and version == steps[0]
        whiten = self.algorithm.whiten and not self.objective.supervised
        if (old or whiten or self.critic is not None) and version != steps[0]:
            raise TrainerError(
                f"step {version} of {batch_url} needs log-probabilities, values or whitened advantages under the weights "
                f"from before the iteration, which began at step {steps[0]}",
                remedy="end the run's trainer by `millrace stop RUN` and start the run again: it is rebuilt",
            )
        rewards = self._rewards(rows)
        oldest = oldest_age(rows)
        batches: dict[int, RankBatch] = {}
        for step in steps:
            due = [
                again for again in range(step, steps[0] + passes * len(steps), len(steps)) if again >= version
            ]
            if not due:
                continue
            members = [i for i, row in enumerate(rows) if row.train_step == step]
            of_step = [rows[i] for i in members], [rewards[i] for i in members]
            batch = self._make_batch(*of_step, oldest=oldest)
            if old:
                batch.set_per_token("old", self.passes.logprobs(batch.packs))
            # a first step that is passed only once computes its log-probabilities itself
            if sampled and (step != steps[0] or passes > 1):
                batch.set_per_token("sampled", self.passes.logprobs(batch.packs))
            if self.critic is not None:
                batch.set_per_token("values", self.critic.values(batch))
            batches |= dict.fromkeys(due, batch)
        if whiten:
            self._whiten([batches[step] for step in steps])
        return batches

    def _whiten(self, batches: Sequence[RankBatch]) -> None:
        """Compute the advantages of all batches of the iteration together, on one scale."""
        for batch in batches:
            if self.algorithm.kl_placement == "reward":
                self._ask_reference(batch)
            self._ask_teacher(batch)
        if self.place.last_stage:
            self._estimate(batches)

    def _rewards(self, rows: Sequence[BatchRow]) -> list[float]:
        """Shaped reward of each row, from which the token-level estimators start."""
        if self.objective.supervised:
            return [row.reward for row in rows]
        samples = ScoredSamples(
            rewards=[row.reward for row in rows],
            group_ids=[0] * len(rows),  # shaping ignores groups
            lengths=[row.response_length for row in rows],
            truncated=[row.truncated for row in rows],
        )
        stored = [row.shaped_reward for row in rows]
        budget = self.config.rollout.longest_response
        return stored_or_shaped(stored, samples, self.algorithm, budget)

    def scored(self) -> tuple[int, float]:
        """Tokens of all ranks' passes without gradients since the last call, and this rank's seconds of them."""
        tokens, seconds = self.passes.clock.take()
        return tokens * self.place.data_size, seconds

    def drop_iteration(self) -> None:
        """Free the batches of the iteration."""
        self._iteration = None

    def logprob_gaps(self) -> dict[int, tuple[float, float]]:
        """Mean and largest difference of engine and trainer on the samples of each step of the iteration, over all ranks.

        Computed before the first update, so that every token is compared under the weights that made it. Tokens of older weights are
        left out; the difference is 0 if they made all tokens. Steps that compute these log-probabilities in their own forward pass
        are missing: their metrics contain the difference.
        """
        assert self._iteration is not None
        sums: MetricSums = {}
        first_pass = [step for step in self._iteration.first_pass if step in self._iteration.batches]
        for step in first_pass:
            batch = self._iteration.batches[step]
            if self.place.reports and batch.sampled_logprobs is not None:
                gap = logprob_gap(batch.sampled_logprobs, batch.rollout_logprobs, batch.compared)
                add_sums(sums, {f"{name}/{step}": value for name, value in to_numbers(gap).items()})
        means = means_of(sum_over_ranks(sums)) if len(self._iteration.batches) > 1 else {}
        steps = [step for step in first_pass if f"logprob_gap_mean/{step}" in means]
        return {step: (means[f"logprob_gap_mean/{step}"], means[f"logprob_gap_max/{step}"]) for step in steps}

    def batches_before_update(self) -> list[RankBatch]:
        """The batches of the iteration's steps, in order, each with log-probabilities under the weights from before the iteration.

        Call it before the first update. The first step's are missing, since its own forward pass will compute them.
        """
        assert self._iteration is not None
        first = self._iteration.first_step
        batches = [self._iteration.batches[step] for step in self._iteration.first_pass]
        for step, batch in zip(self._iteration.first_pass, batches, strict=True):
            if step != first and not batch.computed & {"old", "sampled", "before"}:
                batch.set_per_token("before", self.passes.logprobs(batch.packs))
        return batches

    # a step

    def forward_backward(self, batch: RankBatch, version: int) -> dict[str, float]:
        """Compute the gradients of every model that this step trains; returns the step's metrics over all ranks."""
        self.policy.zero_grad()
        self.objective.kl_coef = self.kl_controller.value
        sums: MetricSums = {}
        if self.place.last_stage and "advantages" not in batch.per_token:
            self._estimate([batch])
        if self.critic is not None:
            self.critic.trainable.zero_grad()
            self.critic.forward_backward(batch, sums)
        policy_step(
            self.passes,
            self.objective,
            batch,
            sums,
            forward_only=not self.trains_policy(version),
            on_launched=self.policy.measure_gradient,
        )
        means = step_metrics(self.objective, sums)
        return explained_variance(means) if self.critic is not None else means

    def chunk_batch(self, rows: Sequence[BatchRow], oldest: int) -> RankBatch:
        """This rank's part of a chunk of the iteration's only step, with all per-token values.

        Its weights are not yet divided by the step's denominator. oldest: largest age of a token in the whole iteration.
        """
        batch = self._make_batch(rows, self._rewards(rows), oldest=oldest, chunk=True)
        if self._needs_old(1):
            batch.set_per_token("old", self.passes.logprobs(batch.packs))
        self._ask_reference(batch)
        if self.place.last_stage:
            self._estimate([batch])
        return batch

    def _estimate(self, batches: Sequence[RankBatch]) -> None:
        """Compute advantages and returns of the batches' tokens. Whitened advantages share one scale over all batches."""
        if self.objective.supervised:
            for batch in batches:
                batch.per_token["advantages"] = torch.zeros_like(batch.mask)
            return
        credit = token_credit(
            self.algorithm,
            rewards=torch.cat([batch.rewards for batch in batches]),
            sample_advantages=_all_or_none([batch.sample_advantages for batch in batches]),
            mask=torch.cat([batch.mask for batch in batches]),
            lengths=torch.cat([batch.lengths for batch in batches]),
            logprobs=torch.cat([batch.per_token.get("old", batch.rollout_logprobs) for batch in batches]),
            ref_logprobs=_all_or_none([batch.per_token.get("ref") for batch in batches]),
            teacher_logprobs=_all_or_none([batch.per_token.get("teacher") for batch in batches]),
            values=_all_or_none([batch.per_token.get("values") for batch in batches]),
            kl_coef=self.kl_controller.value,
            group=self.place.data_group,
        )
        tokens = [len(batch.mask) for batch in batches]
        for batch, advantages in zip(batches, credit.advantages.float().split(tokens), strict=True):
            batch.per_token["advantages"] = advantages
        if credit.returns is not None:
            for batch, returns in zip(batches, credit.returns.float().split(tokens), strict=True):
                batch.per_token["returns"] = returns

    def trains_policy(self, version: int) -> bool:
        """Whether a step trains the policy. The first critic.only_steps steps train only the critic."""
        return self.critic is None or version > self.critic.config.only_steps

    def check_on_policy(self, version: int, metrics: dict[str, float]) -> None:
        """Check an iteration's first step, whose old weights are the weights that it trains.

        Raises RefusedStepError if the ratio is not exactly 1, or the KL not exactly 0 although the reference equals the policy.
        """
        a = self.algorithm
        o = self.objective
        first = (
            self._iteration is None or version == self._iteration.first_step
        )  # None: the iteration's only step, in chunks
        own_loss = a.loss.kind == "function"
        if not a.on_policy_guard or o.supervised or o.ratio_to_rollout or own_loss or not first:
            return
        reference_is_policy = self.reference is not None and self.reference.version == version - 1
        # the reference chooses its experts itself, and engines may have chosen others
        reference_is_policy = reference_is_policy and not self.passes.replays
        try:
            check_on_policy({**metrics, "first_kl": metrics["kl"]} if reference_is_policy else metrics)
        except TrainerError as error:
            raise RefusedStepError(
                f"step {version}: {error}; nothing was applied. algorithm.on_policy_guard=false trains on regardless"
            ) from error

    def models_of_step(self, version: int) -> list[tuple[str, TrainedModel]]:
        """The models that the step trains, each with the prefix of its metrics."""
        policy = [("", self.policy)] if self.trains_policy(version) else []
        return policy + ([("critic_", self.critic.trainable)] if self.critic is not None else [])

    def finish_step(self, version: int, metrics: dict[str, float], samples: int) -> None:
        """After an applied step, update the KL coefficient, the reference and the iteration's batches."""
        if not self.trains_policy(version):
            self.policy.skip()
        elif "kl" in metrics:  # only once the policy trains: its KL before that must not move the coefficient
            self.kl_controller.update(metrics["kl"], samples)
        update_steps = self.algorithm.reference_update_steps
        if self.reference is not None and update_steps and version % update_steps == 0:
            self.reference.copy_policy(version)
            self._forget_reference()
        if self._iteration is not None:
            del self._iteration.batches[version]
            if not self._iteration.batches:
                self._iteration = None

    def _forget_reference(self) -> None:
        """Let later passes ask the reference again, unless its log-probabilities are part of advantages, which stay."""
        if self._iteration is not None and self.algorithm.kl_placement == "loss":
            for batch in self._iteration.batches.values():
                batch.computed.discard("ref")
                batch.per_token.pop("ref", None)

    # checkpoints

    @property
    def checkpoint_parts(self) -> list[str]:
        """The parts of a checkpoint besides the policy."""
        reference = self.reference is not None and self.algorithm.reference_update_steps
        return (["critic"] if self.critic is not None else []) + (["reference"] if reference else [])

    @property
    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """Bytes of tensors that this rank saves."""

    @abstractmethod
    def marked(self) -> dict[str, Any]:
        """What complete.json of a checkpoint says of this trainer."""

    @abstractmethod
    def check_marked(self, marker: dict[str, Any], url: str) -> None:
        """Raise TrainerError, on every rank, if a checkpoint is of another trainer, or of one with other settings."""

    @abstractmethod
    def write(self, folder: Path, version: int, writer: FileSystemWriter | None = None) -> None:
        """Write this rank's part of the state into a folder that all ranks see. Every rank must call it.

        writer: takes the place of the writer of files. Raises StorageError on all ranks if one fails.
        """

    @abstractmethod
    def read(self, folder: Path, files: set[str], marker: dict[str, Any], url: str) -> int:
        """Load the state that `write` wrote, perhaps with other ranks; returns its version. Every rank must call it.

        files: names of the checkpoint's files. url: of the checkpoint, for errors. Raises CorruptFileError before anything is loaded,
        TrainerError if it does not fit.
        """

    def algorithm_state(self) -> dict[str, Any]:
        """State of the algorithm, beside that of the models. Plain values."""
        return {
            "kl_controller": self.kl_controller.state(),
            "reference_version": self.reference.version if self.reference is not None else 0,
            "critic_schedule": self.critic.trainable.schedule.state_dict()
            if self.critic is not None
            else None,
        }
