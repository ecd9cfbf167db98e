"""Core attention over a pack of sequences, with grouped heads, windows and context parallelism.

On a CPU: SDPA, with one call for all sequences of a length. On a GPU: cuDNN for long sequences, variable-length flash attention
for the rest, and for windows. Under context parallelism, ranks exchange heads for tokens, so that each attends over whole sequences with its
share of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.1). If the heads of keys do not divide evenly, keys and
values are gathered and queries stay in zigzag order. Knows nothing of projections or rotary positions.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from millrace.connectors.trainers.megatron.model import dense_attention
from millrace.connectors.trainers.megatron.model.context_parallel import (
    chunk_spans,
    gather_sequences,
    heads_to_tokens,
    tokens_to_heads,
)
from millrace.connectors.trainers.megatron.model.fused import has_kernels


@dataclass
class PackBounds(PackedSeqParams):
    """megatron's description of a pack, with the bounds of its sequences also as Python numbers."""

    bounds: list[int] = field(default_factory=list)
    samples: int = 0
    sample_of_token: Tensor | None = None  # [T / cp] in the rank's order: number in the pack, -1 for padding


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a pack. megatron builds it from a layer spec."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any
    ) -> None:
        super().__init__()
        self.scale: float | None = kwargs.get("softmax_scale")
        self.window: int = config.arch.windows[layer_number - 1]
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
        packed_seq_params: PackBounds | None = None,
    ) -> Tensor:
        """query [T, heads, d], key [T, kv_heads, d], value [T, kv_heads, dv] of this rank -> [T, heads * dv]."""
        assert packed_seq_params is not None, "only packed sequences are supported"
        bounds = tuple(packed_seq_params.bounds)
        size, width = self.cp_group.size(), value.shape[-1]
        if query.shape[-1] != width and (size > 1 or query.is_cuda):
            # kernels, and exchanges of all three together, want one width; zeros change no score
            widest = max(width, query.shape[-1])
            query, key, value = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
        if size == 1:
            out = self._attend(query, key, value, packed_seq_params)
        elif self.by_heads:
            query, key, value = tokens_to_heads(query, key, value, bounds, self.cp_group)
            out = self._attend(query, key, value, packed_seq_params)
            out = heads_to_tokens(out, bounds, self.cp_group)
        else:
            key = gather_sequences(key, bounds, self.cp_group)
            value = gather_sequences(value, bounds, self.cp_group)
            rank = self.cp_group.rank()
            out = _attend_zigzag(query, key, value, self.scale, self.window, bounds, size, rank)
        return out[..., :width].reshape(out.shape[0], -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, params: PackBounds) -> Tensor:
        """Attention within whole sequences: [T, heads, d] -> [T, heads, d]."""
        if dense_attention.usable(query) and not self.window:
            return dense_attention.attend(
                query, key, value, params.bounds, self.scale, varlen=short, dense=dense_attention.cudnn
            )
        if has_kernels(query):
            cu, longest = params.cu_seqlens_q, params.max_seqlen_q
            return varlen(query, key, value, cu, cu, longest, longest, self.scale, self.window)
        return _attend_by_length(query, key, value, params.bounds, self.scale, self.window)


def _attend_zigzag(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int,
    bounds: tuple[int, ...],
    size: int,
    rank: int,
) -> Tensor:
    """Attention of a rank's two chunks of every sequence to keys before each chunk's end: all, or those in a window."""
    if not has_kernels(query):
        chunks = [
            whole(query[a:b], key[s:e], value[s:e], scale, window)
            for (a, b), (s, e) in chunk_spans(bounds, size, rank)
        ]
        return torch.cat(chunks)
    index, cu_q, cu_k, longest_q, longest_k = _varlen_chunks(bounds, size, rank, query.device)
    return varlen(query, key[index], value[index], cu_q, cu_k, longest_q, longest_k, scale, window)


@lru_cache(maxsize=16)
def _varlen_chunks(
    bounds: tuple[int, ...], size: int, rank: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """The chunks in the form for `varlen`: rows of the keys, bounds of queries and of keys, and the longest of each."""
    spans = chunk_spans(bounds, size, rank)
    rows = torch.cat([torch.arange(s, e) for _, (s, e) in spans])
    queries = [end - start for (start, end), _ in spans]
    keys = [end - start for _, (start, end) in spans]
    return (
        rows.to(device),
        _cumulative(queries, device),
        _cumulative(keys, device),
        max(queries),
        max(keys),
    )


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int = 0) -> Tensor:
    """Attention of a sequence, or of its last queries: [q, heads, d] x [k, kv_heads, d] -> [q, heads, d], causal, ends aligned."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return _attention(q, k, v, scale, window).squeeze(0).transpose(0, 1)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
    """PyTorch's attention [B, heads, q, d] of the last queries, causal, ends aligned. window: as in Architecture.windows."""
    queries, keys, mask = q.shape[2], k.shape[2], None
    if queries != keys or 0 < window < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if window:
            mask = mask.triu(keys - queries - window + 1)
    # on a GPU, PyTorch's grouped heads in a wide type would take memory for every pair of tokens
    if q.is_cuda:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=not q.is_cuda
    )


def _attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scale: float | None, window: int
) -> Tensor:
    """Attention of whole sequences, with one call for all sequences of a length, since many short calls would be slow."""
    starts: dict[int, list[int]] = {}
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        starts.setdefault(end - start, []).append(start)
    order = torch.cat([(torch.tensor(at)[:, None] + torch.arange(n)).flatten() for n, at in starts.items()])
    order = order.to(query.device)
    sorted_qkv = [x.index_select(0, order) for x in (query, key, value)]
    pieces, done = [], 0
    for length, at in starts.items():
        tokens = length * len(at)
        q, k, v = (
            x[done : done + tokens].unflatten(0, (len(at), length)).transpose(1, 2) for x in sorted_qkv
        )
        out = _attention(q, k, v, scale, window)
        pieces.append(out.transpose(1, 2).flatten(0, 1))
        done += tokens
    return torch.cat(pieces).index_select(0, torch.argsort(order))


def short(
    query: Tensor, key: Tensor, value: Tensor, part: dense_attention.DensePart, scale: float | None
) -> Tensor:
    """Variable-length attention of a part's sequences."""
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
    window: int = 0,
) -> Tensor:
    """Causal attention of concatenated sequences of any lengths. Queries belong to the last keys of a sequence. GPU only."""
    from torch.nn.attention.varlen import varlen_attn

    extra: dict[str, Any] = {"enable_gqa": True} if _takes_gqa() else {}
    out: Any = varlen_attn(
        query, key, value, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=(window - 1, 0), **extra
    )
    attended: Tensor = out
    return attended


@lru_cache
def _takes_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)
