"""Samples as packs of this rank: token tensors in megatron's layout and the response tokens' places in them.

Owns padding and context parallel order; knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from connectors.megatron.attention import zigzag_positions


@dataclass
class Row:
    """One sample of a batch, as the trainer needs it."""

    sample_id: str
    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_logprobs: list[float]
    advantage: float
    train_step: int


@dataclass
class Pack:
    """One microbatch of this rank. T tokens of the rank, N response tokens of the whole pack."""

    rows: list[Row]
    input_ids: Tensor  # [1, T / cp]
    position_ids: Tensor  # [1, T / cp]
    params: PackedSeqParams
    places: Tensor  # [n] local positions whose next token is a response token held by this rank
    targets: Tensor  # [n] those next tokens
    slots: Tensor  # [n] where they stand among the pack's N response tokens
    count: int  # N

    @property
    def tokens(self) -> int:
        """Tokens of the samples, without padding."""
        return sum(len(row.tokens) for row in self.rows)


def rows_of(table: pa.Table) -> list[Row]:
    """The rows of a batch table, in its order."""
    columns = [
        "sample_id",
        "tokens",
        "response_length",
        "loss_mask",
        "rollout_logprobs",
        "advantage",
        "train_step",
    ]
    rows = table.select(columns).to_pylist()
    return [Row(**{**row, "advantage": row["advantage"] or 0.0}) for row in rows]


def make_pack(rows: Sequence[Row], *, cp_size: int, cp_rank: int, align: int, device: Any) -> Pack:
    """Lay samples end to end, each padded to `align` tokens. No rows gives a pack of padding without response tokens."""
    bounds, flat, positions, next_is_response = [0], [], [], []
    for row in rows:
        length = len(row.tokens)
        padded = -(-length // align) * align
        flat += row.tokens + [0] * (padded - length)
        positions += range(padded)
        prompt = length - row.response_length
        next_is_response += [prompt - 1 <= at < length - 1 for at in range(padded)]
        bounds.append(bounds[-1] + padded)
    if not rows:
        flat, positions, next_is_response = [0] * align, list(range(align)), [False] * align
        bounds.append(align)
    tokens, chosen = torch.tensor(flat), torch.tensor(next_is_response)
    mine = zigzag_positions(bounds, cp_size, cp_rank) if cp_size > 1 else torch.arange(len(flat))
    slot_of = chosen.cumsum(0) - 1
    places = chosen[mine].nonzero()[:, 0]
    whole = mine[places]
    targets = tokens[(whole + 1).clamp(max=len(flat) - 1)]
    cu = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True))
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    params.bounds = bounds
    return Pack(
        rows=list(rows),
        input_ids=tokens[mine][None].to(device),
        position_ids=torch.tensor(positions)[mine][None].to(device),
        params=params,
        places=places.to(device),
        targets=targets.to(device),
        slots=slot_of[whole].to(device),
        count=int(chosen.sum()),
    )
