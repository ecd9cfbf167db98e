"""Compares engine and trainer before an iteration's first update: the rounding floor, the refusal, and its likely cause.

Owns which log-probabilities are computed a second time, and when; and which rank stores the trainer's: only the last pipeline
stage has the values, and of ranks with equal values one writes. A file is named by its content's hash: a repeated step with the
same bits writes the same files, and one with other bits overwrites none. `core.logprob_gap` owns the limit and the causes. Every
rank calls every method with the same rows, so that all ranks refuse or none does.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.connectors.storage import tables
from millrace.connectors.storage.run_folder import LOGPROBS
from millrace.connectors.storage.store import split_url
from millrace.connectors.trainers.learner import Learner
from millrace.connectors.trainers.packing import BatchRow, Pack, make_packs
from millrace.connectors.trainers.passes import MetricSums, means_of, sum_over_ranks
from millrace.connectors.trainers.place import RankPlace
from millrace.connectors.trainers.rank_batch import RankBatch
from millrace.connectors.trainers.refusals import refuse_gap
from millrace.core import logprob_gap
from millrace.core.contracts.sample import SampleLogprobs
from millrace.core.contracts.schema import to_table
from millrace.core.contracts.task_records import FileRecord
from millrace.core.logprob_gap import AGAIN, SAMPLES, LogprobGuard, Tokens, chosen_samples

EXPLAINED = 512, 1 << 20  # most samples and tokens that are examined for the cause of a refusal


class Comparison:
    """Compares one iteration's samples, on one rank."""

    def __init__(self, learner: Learner, guard: LogprobGuard) -> None:
        self._learner = learner
        self._guard = guard
        self._floor = guard.floor
        self.figures: dict[str, float] = {}  # metrics of the compared step

    def check(self, rows: Sequence[BatchRow], mean: float, largest: float, version: int) -> None:
        """Raise RefusedStepError, before step `version` is applied, if the mean difference on a step's rows exceeds the limit.

        If the rounding floor was measured on other samples, it is measured again first, since the policy may have become less sure.
        """
        if not any(_compared(row).any() for row in rows):
            return
        measures, new = self._guard.limit is None, self._floor is None
        floor = (self._floor or 0.0) if not (measures and new) else self._measure(rows, SAMPLES)
        if measures and not mean <= self._guard.allows(floor):
            floor = self._measure(rows, AGAIN)
        limit = self._guard.allows(floor)
        if not mean <= limit:
            refuse_gap(
                self._learner.config.dtype,
                version,
                rows[0].train_step,
                mean,
                largest,
                limit,
                floor if measures else None,
                logprob_gap.likely_cause(self._tokens(rows), limit, self._learner.passes.temperature),
            )
        self.figures["logprob_gap_limit"] = limit
        if measures:
            self.figures["logprob_gap_floor"] = floor

    def _measure(self, rows: Sequence[BatchRow], most: int) -> float:
        """Measure the rounding floor: the mean absolute difference of two computations of the trainer, on some of the rows."""
        self._floor = rounding_floor(self._learner, rows, most)
        return self._floor

    def _tokens(self, rows: Sequence[BatchRow]) -> Tokens:
        """The compared tokens of some of the rows, of all ranks."""
        learner = self._learner
        chosen = chosen_samples([len(row.tokens) for row in rows], *EXPLAINED)
        members = [rows[index] for index in chosen]
        packs = make_packs(members, learner.config, learner.architecture, learner.device, learner.place)
        values = learner.passes.forward(packs, self._two)
        parts: dict[int, np.ndarray] = {}
        if values is not None and learner.place.reports:
            for number, part in zip(_members(packs), values.cpu().split(_lengths(packs)), strict=True):
                parts[number] = part.numpy().astype(np.float64)
        of_ranks: list[dict[int, np.ndarray]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, parts)
        every = {number: part for found in of_ranks for number, part in found.items()}
        kept = [np.flatnonzero(_compared(row)) for row in members]
        prompts = [len(row.tokens) - row.response_length for row in members]
        both = np.concatenate([every[number][at] for number, at in enumerate(kept)])
        return Tokens(
            engine=np.concatenate(
                [row.rollout_logprobs[at] for row, at in zip(members, kept, strict=True)]
            ).astype(np.float64),
            trainer=both[:, 0],
            entropy=both[:, 1],
            sample=np.repeat(np.arange(len(members)), [len(at) for at in kept]),
            position=np.concatenate([at + prompt for at, prompt in zip(kept, prompts, strict=True)]),
            engine_of=[row.engine_id for row in members],
        )

    def _two(self, pack: Pack, hidden: Tensor) -> Tensor:
        """Log-probabilities and entropies [N, 2]."""
        found = self._learner.passes.token_logprobs(pack, hidden, entropy=True, entropy_gradient=False)
        assert found.entropies is not None
        return torch.stack([found.targets, found.entropies], dim=-1)


def rounding_floor(learner: Learner, rows: Sequence[BatchRow], most: int = SAMPLES) -> float:
    """Mean |log p in the model's type - log p one type wider| over the tokens with a loss of at most `most` rows.

    Makes one forward pass of each kind, with at most one pack per rank. Changes nothing.
    """
    tokens = learner.config.trainer.max_pack_tokens * learner.place.data_size
    trained = [row for row in rows if row.loss_mask.any()]
    members = [trained[index] for index in chosen_samples([len(row.tokens) for row in trained], most, tokens)]
    packs = make_packs(members, learner.config, learner.architecture, learner.device, learner.place)
    narrow, wide = learner.passes.logprobs(packs), learner.passes.wider_logprobs(packs)
    sums: MetricSums = {}
    if narrow is not None and wide is not None and learner.place.reports:
        masks = [torch.from_numpy(row.loss_mask).bool() for pack in packs for row in pack.rows]
        mask = (
            torch.cat(masks).to(narrow.device)
            if masks
            else torch.zeros(0, dtype=torch.bool, device=narrow.device)
        )
        gap = (narrow.double() - wide.double()).abs()[mask]
        sums["floor"] = float(gap.sum()), float(len(gap))
    return means_of(sum_over_ranks(sums))["floor"]


def _compared(row: BatchRow) -> np.ndarray:
    """A mask of the response tokens on which engine and trainer must agree."""
    mask: np.ndarray = row.loss_mask.astype(bool)
    return mask if row.ages is None else mask & (row.ages == 0)


def _members(packs: Sequence[Pack]) -> list[int]:
    return [number for pack in packs for number in pack.members]


def _lengths(packs: Sequence[Pack]) -> list[int]:
    return [row.response_length for pack in packs for row in pack.rows]


def sample_logprobs(batch: RankBatch, place: RankPlace) -> list[SampleLogprobs]:
    """The rows of a batch's samples, on a rank that writes them; empty on others. Call it after the forward pass, before an update."""
    if not (place.last_stage and place.reports):
        return []
    rows = batch.rows
    values = batch.logprobs_before_update.float().cpu().split([row.response_length for row in rows])
    return [
        SampleLogprobs(sample_id=row.sample_id, train_step=row.train_step, trainer_logprobs=part.numpy())
        for row, part in zip(rows, values, strict=True)
    ]


def write_logprobs(rows: Sequence[SampleLogprobs], batch_url: str, place: RankPlace) -> list[FileRecord]:
    """Write this rank's rows beside the batch. Every rank returns the records of all ranks' files, relative to that folder."""
    written: FileRecord | None = None
    if rows:
        data = tables.encode(to_table(rows, "logprobs"), "logprobs")
        digest = hashlib.sha256(data).hexdigest()[:16]
        path = f"{LOGPROBS}/rank-{place.data_rank:05d}.{digest}.parquet"
        entry = split_url(batch_url)[0].write(path, data)
        written = entry.model_copy(update={"rows": len(rows), "table": "logprobs"}).record()
    everywhere: list[Any] = [written] * dist.get_world_size()
    if len(everywhere) > 1:
        dist.all_gather_object(everywhere, written)
    return [record for record in everywhere if record is not None]
