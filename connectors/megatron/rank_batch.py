"""This rank's part of one optimizer step: its packs, and figures of their response tokens end to end.

Owns the layout in which everything that the algorithm needs stands beside the packs; knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.connectors.megatron.packing import Pack, Row, packs_of
from millrace.core.algorithms.objective import Objective
from millrace.core.algorithms.packed import spread
from millrace.core.architecture import Architecture
from millrace.core.config import RunConfig
from millrace.core.errors import TrainerError


@dataclass
class Share:
    """Packs of N response tokens of B samples in all. `figures` [N] by name: what models said of the tokens."""

    packs: list[Pack]
    samples: int  # of the whole step
    lengths: Tensor  # [B] response lengths
    mask: Tensor  # [N] 1: in the loss
    rollout_logprobs: Tensor  # [N] the engine's
    weights: Tensor  # [N] of millrace.core.algorithms.aggregate, over the whole step
    token_weight: float  # one over the unmasked tokens of the whole step
    rewards: Tensor  # [B] float64
    sample_advantages: Tensor | None  # [B] float64
    figures: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The packs' samples, in their order."""
        return [row for pack in self.packs for row in pack.rows]

    def spans(self) -> list[slice]:
        """Where each pack's response tokens stand."""
        return _spans([pack.count for pack in self.packs])

    def pack_lengths(self) -> list[Tensor]:
        """Response lengths of each pack's samples."""
        return [self.lengths[span] for span in _spans([len(pack.rows) for pack in self.packs])]


def share_of(
    rows: Sequence[Row],
    rewards: Sequence[float],
    objective: Objective,
    config: RunConfig,
    shape: Architecture,
    device: Any,
) -> Share:
    """This rank's part of a step on `rows`. `rewards`: shaped, of each row; `shape`: the policy's.

    Raises TrainerError if only some rows have an advantage.
    """
    packs = packs_of(rows, config, shape, device)
    counts = torch.tensor([int(row.loss_mask.sum()) for row in rows], dtype=torch.float64)
    weights = objective.sample_weights(counts, config.rollout.sampling.max_new_tokens)
    members = torch.tensor([i for pack in packs for i in pack.members], dtype=torch.long)
    mine = [row for pack in packs for row in pack.rows]
    lengths = torch.tensor([row.response_length for row in mine], dtype=torch.long)
    return Share(
        packs=packs,
        samples=len(rows),
        lengths=lengths.to(device),
        mask=_stacked([row.loss_mask for row in mine], device),
        rollout_logprobs=_stacked([row.rollout_logprobs for row in mine], device),
        weights=spread(weights[members].float(), lengths).to(device),
        token_weight=1.0 / max(1.0, float(counts.sum())),
        rewards=torch.tensor(rewards, dtype=torch.float64)[members].to(device),
        sample_advantages=_advantages(rows, mine, device),
    )


def _advantages(rows: Sequence[Row], mine: Sequence[Row], device: Any) -> Tensor | None:
    missing = [row.sample_id for row in rows if row.advantage is None]
    if not missing:
        return torch.tensor([row.advantage for row in mine], dtype=torch.float64, device=device)
    if len(missing) < len(rows):
        raise TrainerError(
            f"{len(missing)} of the step's {len(rows)} samples have no advantage, {missing[0]} for one; "
            "the batch was not written whole: run the filter again"
        )
    return None


def _stacked(parts: list[Any], device: Any) -> Tensor:
    whole = np.concatenate(parts).astype(np.float32, copy=True) if parts else np.zeros(0, dtype=np.float32)
    return torch.from_numpy(whole).to(device)


def _spans(counts: Sequence[int]) -> list[slice]:
    ends = np.cumsum([0, *counts]).tolist()
    return [slice(start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]


def largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """A maximum as a metric: its weight is NaN."""
    top = values.max() if values.numel() else values.new_zeros(())
    return top, torch.full_like(top, math.nan)
