"""Core attention for packed sequences: SDPA a sequence on CPU; on GPU cuDNN's for long sequences, varlen flash attention.

Owns attention over [T, heads, head_dim] packs with grouped heads and context parallelism: ranks exchange heads for tokens,
so that each attends over whole sequences with its share of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.1); where they
cannot share the heads of keys evenly, keys and values are gathered and queries stay where they are in megatron's zigzag
order. Knows nothing of projections or rotary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from millrace.connectors.megatron.model import dense_attention

Exchange = Callable[[Tensor, tuple[int, ...], Any], Tensor]  # tensor, bounds, group


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a pack. Built by megatron from a layer spec."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any
    ) -> None:
        super().__init__()
        self.scale: float | None = kwargs.get("softmax_scale")
        self.cp_group: Any = kwargs["pg_collection"].cp
        kv_heads = config.num_query_groups // config.tensor_model_parallel_size
        self.by_heads = kv_heads % self.cp_group.size() == 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, heads, d], key and value [T, kv_heads, d] of this rank -> [T, heads * d]."""
        assert packed_seq_params is not None, "only packed sequences are supported"
        bounds: list[int] = packed_seq_params.bounds  # type: ignore[attr-defined]
        size, pack = self.cp_group.size(), tuple(bounds)
        if size == 1:
            out = self._within(query, key, value, bounds, packed_seq_params)
        elif self.by_heads:
            mine = _heads_for_tokens(query, key, value, pack, self.cp_group)
            out = self._within(*mine, bounds, packed_seq_params)
            out = _Exchange.apply(out, _to_tokens, _to_heads, pack, self.cp_group)
        else:
            key = _GatherSequences.apply(key, pack, self.cp_group)
            value = _GatherSequences.apply(value, pack, self.cp_group)
            out = _zigzag(query, key, value, self.scale, pack, size, self.cp_group.rank())
        return out.reshape(out.shape[0], -1)

    def _within(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int], params: PackedSeqParams
    ) -> Tensor:
        """Of whole sequences: [T, heads, d] -> [T, heads, d]."""
        if dense_attention.usable(query):
            return dense_attention.attend(
                query, key, value, bounds, self.scale, varlen=short, dense=dense_attention.cudnn
            )
        if query.is_cuda:
            cu, longest = params.cu_seqlens_q, params.max_seqlen_q
            return varlen(query, key, value, cu, cu, longest, longest, self.scale)
        return _by_length(query, key, value, bounds, self.scale)


def _heads_for_tokens(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[int, ...], group: Any
) -> Sequence[Tensor]:
    """Each [T / size, heads, d], a rank's tokens -> [T, heads / size, d], all tokens in the pack's order, in one exchange."""
    shares = [x.shape[1] // group.size() for x in (query, key, value)]
    split = [x.unflatten(1, (group.size(), -1)) for x in (query, key, value)]
    out: Tensor = _Exchange.apply(torch.cat(split, dim=2), _to_heads, _to_tokens, bounds, group)
    return out.split(shares, dim=1)


def _zigzag(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    bounds: tuple[int, ...],
    size: int,
    rank: int,
) -> Tensor:
    """Each rank's two chunks of every sequence attend to all keys before their end."""
    if not query.is_cuda:
        pieces = [
            whole(query[a:b], key[s:e], value[s:e], scale) for (a, b), (s, e) in _spans(bounds, size, rank)
        ]
        return torch.cat(pieces)
    index, *lengths = _varlen_spans(bounds, size, rank, query.device)
    return varlen(query, key[index], value[index], *lengths, scale)


@lru_cache(maxsize=16)
def _spans(
    bounds: tuple[int, ...], size: int, rank: int
) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Of each chunk of a rank: its span in the local queries, and in the full keys."""
    found, at = [], 0
    for start, end in pairwise(bounds):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            found.append(((at, at + chunk), (start, start + (number + 1) * chunk)))
            at += chunk
    return tuple(found)


@lru_cache(maxsize=16)
def _varlen_spans(
    bounds: tuple[int, ...], size: int, rank: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """The spans as `varlen` wants them: rows of the keys, bounds of queries and keys, the longest of both."""
    spans = _spans(bounds, size, rank)
    rows = torch.cat([torch.arange(s, e) for _, (s, e) in spans])
    queries, keys = ([end - start for start, end in kind] for kind in zip(*spans, strict=True))
    return (
        rows.to(device),
        _cumulative(queries, device),
        _cumulative(keys, device),
        max(queries),
        max(keys),
    )


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """One sequence (or the end of one): [q, heads, d] x [k, kv_heads, d] -> [q, heads, d], causal from the end."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    if query.shape[0] == key.shape[0]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        offset = key.shape[0] - query.shape[0]
        mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device).tril(offset)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _by_length(query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scale: float | None) -> Tensor:
    """Whole sequences, those of one length in one call: short samples would else cost a call each."""
    starts: dict[int, list[int]] = {}
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        starts.setdefault(end - start, []).append(start)
    order = torch.cat([(torch.tensor(at)[:, None] + torch.arange(n)).flatten() for n, at in starts.items()])
    sorted_qkv = [x.index_select(0, order) for x in (query, key, value)]
    pieces, done = [], 0
    for length, at in starts.items():
        tokens = length * len(at)
        q, k, v = (
            x[done : done + tokens].unflatten(0, (len(at), length)).transpose(1, 2) for x in sorted_qkv
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        pieces.append(out.transpose(1, 2).flatten(0, 1))
        done += tokens
    return torch.cat(pieces).index_select(0, torch.argsort(order))


def short(
    query: Tensor, key: Tensor, value: Tensor, part: dense_attention.Part, scale: float | None
) -> Tensor:
    """A part's sequences by variable-length attention."""
    cu = dense_attention.cumulative(part.bounds, query.device)
    longest = max(end - start for start, end in pairwise(part.bounds))
    return varlen(query, key, value, cu, cu, longest, longest, scale)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float | None,
) -> Tensor:
    """Causal attention of sequences end to end, at any lengths; queries are the last of their keys. GPU only."""
    from torch.nn.attention.varlen import varlen_attn

    extra: dict[str, Any] = {"enable_gqa": True} if _takes_gqa() else {}
    out: Tensor = varlen_attn(
        query, key, value, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=(-1, 0), **extra
    )
    return out


@lru_cache
def _takes_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)


class _Exchange(torch.autograd.Function):
    """`there` (_to_heads or _to_tokens) of a tensor; its gradient goes `back` by the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Exchange, back: Exchange, bounds: tuple[int, ...], group: Any
    ) -> Tensor:
        ctx.back, ctx.bounds, ctx.group = back, bounds, group
        return there(x, bounds, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.bounds, ctx.group), None, None, None, None


def _to_heads(local: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
    """[T / size, size, share, d], this rank's tokens, heads by the rank they go to -> [T, share, d] in the pack's order."""
    _, places = _zigzag_order(bounds, group.size(), local.device)
    given = local.transpose(0, 1).contiguous()
    parts = torch.empty_like(given)  # tokens of each rank, with this rank's heads
    dist.all_to_all_single(parts, given, group=group)
    return parts.flatten(0, 1)[places]


def _to_tokens(whole: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
    """The way back: [T, share, d] in the pack's order -> [T / size, size, share, d]."""
    positions, _ = _zigzag_order(bounds, group.size(), whole.device)
    given = whole[positions]
    parts = torch.empty_like(given)  # this rank's tokens, with the heads of each rank
    dist.all_to_all_single(parts, given, group=group)
    return parts.unflatten(0, (group.size(), -1)).transpose(0, 1)


class _GatherSequences(torch.autograd.Function):
    """Keys or values [T / size, ...] of all ranks in sequence order [T, ...]; backward gives each rank its part's sum."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
        ctx.bounds, ctx.group = bounds, group
        _, places = _zigzag_order(bounds, group.size(), local.device)
        parts = local.new_empty(bounds[-1], *local.shape[1:])
        dist.all_gather_into_tensor(parts, local.contiguous(), group=group)
        return parts[places]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        size = ctx.group.size()
        positions, _ = _zigzag_order(ctx.bounds, size, grads[0].device)
        grad = grads[0].new_empty(ctx.bounds[-1] // size, *grads[0].shape[1:])
        dist.reduce_scatter_tensor(grad, grads[0][positions], group=ctx.group)
        return grad, None, None


@lru_cache(maxsize=16)
def _zigzag_order(bounds: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the pack in the ranks' parts laid end to end, and where each position stands there. [T] both."""
    positions = torch.cat([zigzag_positions(bounds, size, rank) for rank in range(size)])
    return positions.to(device), torch.argsort(positions).to(device)


def zigzag_positions(bounds: Sequence[int], size: int, rank: int) -> Tensor:
    """Positions of the pack that a context parallel rank holds, in its local order. [T / size]."""
    pieces = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank) if size > 1 else (0, 1):
            pieces.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        if size == 1 and (end - start) % 2:
            pieces.append(torch.arange(end - 1, end))
    return torch.cat(pieces)
