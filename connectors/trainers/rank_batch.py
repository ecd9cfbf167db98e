"""This rank's part of one optimizer step: its packs, and values per response token.

Owns the layout: the response tokens of all packs are concatenated in one dimension N. Knows nothing of models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.packing import BatchRow, Pack, make_packs
from millrace.connectors.trainers.place import RankPlace
from millrace.core.algorithms.aggregate import spread
from millrace.core.algorithms.objective import Objective
from millrace.core.config import RunConfig
from millrace.core.contracts.ids import rollout_of
from millrace.core.errors import TrainerError, of_run
from millrace.core.families.architecture import Architecture
from millrace.core.families.routed_experts import RoutingFormat


@dataclass
class RankBatch:
    """Packs with N response tokens of B samples in total."""

    packs: list[Pack]
    samples: int  # of the whole step, over all ranks
    tokens: int  # of the whole step, over all ranks, prompts and responses
    lengths: Tensor  # [B] response lengths
    mask: Tensor  # [N] 1: in the loss
    rollout_logprobs: Tensor  # [N] the engine's
    weights: Tensor  # [N] of millrace.core.algorithms.aggregate, over the whole step
    token_weight: float  # 1 / unmasked tokens of the whole step
    rewards: Tensor  # [B] float64
    sample_advantages: Tensor | None  # [B] float64
    ages: Tensor  # [N] published versions from a token's weights to the weights before the iteration
    oldest: int  # largest age in the whole iteration, over all ranks
    # [N] each, by name: "old", "sampled", "before" (only stored), "ref" and "teacher" log-probabilities, the critic's "values",
    # "advantages" and "returns"; [N, k] "teacher_top" log-probabilities
    per_token: dict[str, Tensor] = field(default_factory=dict)
    # names for which every rank has run its forward pass; stages before the last have only the names
    computed: set[str] = field(default_factory=set)
    # log-probabilities from the step's own forward pass, by the pack's number; none on stages before the last
    passed: dict[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> list[BatchRow]:
        """The samples, in the order of the packs."""
        return [row for pack in self.packs for row in pack.rows]

    def spans(self) -> list[slice]:
        """Each pack's range of response tokens."""
        return _spans([pack.count for pack in self.packs])

    def pack_lengths(self) -> list[Tensor]:
        """Response lengths of each pack's samples."""
        return [self.lengths[span] for span in _spans([len(pack.rows) for pack in self.packs])]

    @property
    def sampled_logprobs(self) -> Tensor | None:
        """Log-probabilities [N] under the sampling weights; None unless a forward pass before the first update computed them."""
        return self.per_token.get("old", self.per_token.get("sampled"))

    @property
    def compared(self) -> Tensor:
        """Mask [N] of the tokens that the weights before the iteration made. On these, engine and trainer must agree."""
        return self.mask * (self.ages == 0)

    @property
    def logprobs_before_update(self) -> Tensor:
        """Log-probabilities [N] under the weights from before the iteration, available after its first step's forward pass."""
        found = self.per_token.get("before", self.sampled_logprobs)
        return torch.cat([self.passed[i] for i in range(len(self.packs))]) if found is None else found

    def set_per_token(self, name: str, values: Tensor | None) -> None:
        """Add values [N] under a name, and mark the name as computed. Stages before the last pass None, which adds no values."""
        self.computed.add(name)
        if values is not None:
            self.per_token[name] = values


def make_rank_batch(
    rows: Sequence[BatchRow],
    rewards: Sequence[float],
    objective: Objective,
    config: RunConfig,
    architecture: Architecture | None,
    device: Any,
    place: RankPlace,
    *,
    oldest: int,
    chunk: bool = False,
) -> RankBatch:
    """This rank's part of a step on `rows`, which are all samples of the step. `rewards`: the shaped reward of each row.

    oldest: largest age of a token in the whole iteration. chunk: the rows are only some whole rollouts of the step, so weights are
    not yet divided by the step's denominator.
    Raises TrainerError, on every rank, if a row has no advantage although others have one or the estimator needs it, or if
    it lacks a served teacher's values, or valid experts that are to be replayed.
    """
    if config.algorithm.teacher_server is not None:
        _check_teacher(rows, config.algorithm.teacher_top_k)
    if config.rollout.routing_replay:
        assert architecture is not None, "a family that is not known has no experts to replay"
        _check_routed(rows, architecture)
    packs = make_packs(rows, config, architecture, device, place)
    token_counts, rollouts = counted(rows)
    weigh = objective.undivided_weights if chunk else objective.sample_weights
    sample_weights = weigh(token_counts, config.rollout.longest_response, rollouts)
    members = torch.tensor([i for pack in packs for i in pack.members], dtype=torch.long)
    rank_rows = [row for pack in packs for row in pack.rows]
    lengths = torch.tensor([row.response_length for row in rank_rows], dtype=torch.long)
    batch = RankBatch(
        packs=packs,
        samples=len(rows),
        tokens=sum(len(row.tokens) for row in rows),
        lengths=lengths.to(device),
        mask=_concatenate([row.loss_mask for row in rank_rows], device),
        rollout_logprobs=_concatenate([row.rollout_logprobs for row in rank_rows], device),
        weights=spread(sample_weights[members].float(), lengths).to(device),
        token_weight=1.0 / max(1.0, float(token_counts.sum())),
        rewards=torch.tensor(rewards, dtype=torch.float64)[members].to(device),
        sample_advantages=_sample_advantages(rows, rank_rows, config, device),
        ages=_concatenate(
            [np.zeros(row.response_length) if row.ages is None else row.ages for row in rank_rows], device
        ),
        oldest=oldest,
    )
    if config.algorithm.teacher_server is not None:
        batch.set_per_token("teacher", _concatenate([row.teacher_logprobs for row in rank_rows], device))
        if config.algorithm.teacher_top_k:
            none = np.zeros((0, config.algorithm.teacher_top_k))
            tops = _concatenate([none, *(row.teacher_top_logprobs for row in rank_rows)], device)
            batch.set_per_token("teacher_top", tops)
    return batch


def counted(rows: Sequence[BatchRow]) -> tuple[Tensor, Tensor]:
    """For each row the number of its tokens in the loss [B], float64, and its rollout's number [B], in order of appearance."""
    numbers: dict[str, int] = {}
    rollouts = [numbers.setdefault(rollout_of(row.sample_id), len(numbers)) for row in rows]
    counts = [int(row.loss_mask.sum()) for row in rows]
    return torch.tensor(counts, dtype=torch.float64), torch.tensor(rollouts)


def _check_teacher(rows: Sequence[BatchRow], top_k: int) -> None:
    """Raise TrainerError if a row of the step lacks the teacher's values. All ranks check all rows."""
    missing = [row.sample_id for row in rows if row.teacher_logprobs is None]
    if missing:
        raise TrainerError(
            f"{len(missing)} of the step's {len(rows)} samples have no log-probabilities of the teacher, such as {missing[0]}",
            where="algorithm.teacher_server",
            remedy="a batch that was stored without a served teacher cannot be trained with one",
        )
    shapes = ((row.sample_id, row.teacher_top_tokens, row.response_length) for row in rows)
    other = [name for name, tops, length in shapes if tops is None or tops.shape != (length, top_k)]
    if top_k and other:
        raise TrainerError(
            f"{len(other)} of the step's {len(rows)} samples have no {top_k} likeliest tokens of the teacher, such as {other[0]}",
            where="algorithm.teacher_server.top_k",
            remedy="set it to what it was when the batch was stored",
        )


def _check_routed(rows: Sequence[BatchRow], architecture: Architecture) -> None:
    """Raise TrainerError unless every row has the experts of the tokens that need some. All ranks check all rows."""
    form = RoutingFormat.of(architecture)
    assert form is not None, "a model without experts is refused"
    for row in rows:
        try:
            if row.routed is not None:
                form.read(row.routed, len(row.tokens), row.fed)
            elif row.fed:
                raise ValueError("it was stored without any")
        except ValueError as error:
            raise TrainerError(
                f"sample {row.sample_id} has no experts that could be replayed: {error}",
                where="rollout.routing_replay",
                remedy="train samples that this model generated with it; a branch may set it to false",
            ) from error


def _sample_advantages(
    rows: Sequence[BatchRow], rank_rows: Sequence[BatchRow], config: RunConfig, device: Any
) -> Tensor | None:
    missing = [row.sample_id for row in rows if row.advantage is None]
    if not missing:
        return torch.tensor([row.advantage for row in rank_rows], dtype=torch.float64, device=device)
    if len(missing) < len(rows) or config.algorithm.advantage_of_samples:
        url = Store(config.storage.root).child(config.run.name).url
        raise TrainerError(
            f"{len(missing)} of the step's {len(rows)} samples have no advantage, such as {missing[0]}; "
            "the batch was not written whole",
            remedy="have it filtered again: "
            f"`millrace discard {of_run(config.run.name, url, '--iteration ITERATION')}`",
        )
    return None


def _concatenate(parts: list[Any], device: Any) -> Tensor:
    whole = np.concatenate(parts).astype(np.float32, copy=True) if parts else np.zeros(0, dtype=np.float32)
    return torch.from_numpy(whole).to(device)


def _spans(counts: Sequence[int]) -> list[slice]:
    ends = np.cumsum([0, *counts]).tolist()
    return [slice(start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]
