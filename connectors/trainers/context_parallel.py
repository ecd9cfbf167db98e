"""Sequences of a pack over context parallel ranks: megatron's zigzag order, and exchanges with the whole pack.

Each sequence is cut into 2 * size chunks; rank r holds chunks r and 2 * size - 1 - r, which balances causal attention.
Owns the order and the exchanges, forward and backward. Knows nothing of attention itself.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.connectors.trainers.packing import zigzag_positions

_Exchange = Callable[[Tensor, tuple[int, ...], Any], Tensor]  # tensor, bounds, group -> tensor
Span = tuple[int, int]


@lru_cache(maxsize=16)
def chunk_spans(bounds: tuple[int, ...], size: int, rank: int) -> tuple[tuple[Span, Span], ...]:
    """For each chunk of a rank: its span in the local queries, and the span of keys in the whole pack that it attends to."""
    spans, local = [], 0
    for start, end in pairwise(bounds):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            spans.append(((local, local + chunk), (start, start + (number + 1) * chunk)))
            local += chunk
    return tuple(spans)


def gather_sequences(local: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
    """Keys, values or latents [T / size, ...] of all ranks in the pack's order [T, ...]; backward sums each rank's part."""
    out: Tensor = _GatherSequences.apply(local, bounds, group)
    return out


def tokens_to_heads(tensors: Sequence[Tensor], bounds: tuple[int, ...], group: Any) -> tuple[Tensor, ...]:
    """Each [T / size, heads, d] of this rank's tokens -> [T, heads / size, d] in the pack's order, in one exchange."""
    by_rank = [x.unflatten(1, (group.size(), -1)) for x in tensors]
    shares = [x.shape[2] for x in by_rank]
    out: Tensor = _ExchangeHeads.apply(torch.cat(by_rank, dim=2), _to_heads, _to_tokens, bounds, group)
    return tuple(out.split(shares, dim=1))


def heads_to_tokens(heads: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
    """[T, heads / size, d] in the pack's order -> [T / size, size, heads / size, d] of this rank's tokens."""
    out: Tensor = _ExchangeHeads.apply(heads, _to_tokens, _to_heads, bounds, group)
    return out


class _ExchangeHeads(torch.autograd.Function):
    """Applies `forth` (_to_heads or _to_tokens) to a tensor, and `back`, the other of the two, to its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forth: _Exchange, back: _Exchange, bounds: tuple[int, ...], group: Any
    ) -> Tensor:
        ctx.back, ctx.bounds, ctx.group = back, bounds, group
        return forth(x, bounds, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.bounds, ctx.group), None, None, None, None


def _to_heads(local: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
    """[T / size, size, share, d], this rank's tokens and all heads by target rank -> [T, share, d] in the pack's order."""
    _, indices = _zigzag_order(bounds, group.size(), local.device)
    sent = local.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)  # tokens of each rank, with this rank's heads
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1)[indices]


def _to_tokens(whole: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
    """The inverse: [T, share, d] in the pack's order -> [T / size, size, share, d]."""
    positions, _ = _zigzag_order(bounds, group.size(), whole.device)
    sent = whole[positions]
    received = torch.empty_like(sent)  # this rank's tokens, with the heads of each rank
    dist.all_to_all_single(received, sent, group=group)
    out: Tensor = received.unflatten(0, (group.size(), -1)).transpose(0, 1)
    return out


class _GatherSequences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
        ctx.bounds, ctx.group = bounds, group
        _, indices = _zigzag_order(bounds, group.size(), local.device)
        parts = local.new_empty(bounds[-1], *local.shape[1:])
        dist.all_gather_into_tensor(parts, local.contiguous(), group=group)
        return parts[indices]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        size = ctx.group.size()
        positions, _ = _zigzag_order(ctx.bounds, size, grads[0].device)
        grad = grads[0].new_empty(ctx.bounds[-1] // size, *grads[0].shape[1:])
        dist.reduce_scatter_tensor(grad, grads[0][positions], group=ctx.group)
        return grad, None, None


@lru_cache(maxsize=16)
def _zigzag_order(bounds: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The concatenated parts of all ranks, as positions of the pack, and the index of each position in them. Both [T]."""
    positions = torch.cat([zigzag_positions(bounds, size, rank) for rank in range(size)])
    return positions.to(device), torch.argsort(positions).to(device)
