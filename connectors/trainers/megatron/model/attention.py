"""Core attention over a pack of sequences, with grouped heads, windows, sinks and context parallelism.

On a CPU: SDPA, with one call for all sequences of a length. On a GPU: `ops.pack_attention`. Under context parallelism, ranks
exchange heads for tokens, so that each attends over whole sequences with its share of the heads (DeepSpeed-Ulysses, Jacobs et al.
2023, section 3.1). If the heads of keys do not divide evenly, keys and values are gathered and queries stay in zigzag order.

A sink is a logit that each head has beside the logits of its keys. Knows nothing of projections or rotary positions.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from millrace.connectors.trainers.context_parallel import (
    chunk_spans,
    gather_sequences,
    heads_to_tokens,
    tokens_to_heads,
)
from millrace.connectors.trainers.ops import pack_attention
from millrace.connectors.trainers.ops.fused import has_kernels
from millrace.connectors.trainers.ops.sequence_attention import attend_by_length, whole
from millrace.connectors.trainers.packing import Pack


@dataclass
class PackBounds(PackedSeqParams):
    """megatron's description of a pack, with the bounds of its sequences also as Python numbers."""

    bounds: list[int] = field(default_factory=list)
    samples: int = 0
    sample_of_token: Tensor | None = None  # [T / cp] in the rank's order: number in the pack, -1 for padding
    # [T / cp, layers with experts, experts of a token] that routers take, -1 for a token that they route themselves; None: all
    routed: Tensor | None = None

    @classmethod
    def of(cls, pack: Pack, routed: Tensor | None = None) -> "PackBounds":
        """A pack's bounds, with the experts to replay."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=pack.starts,
            cu_seqlens_kv=pack.starts,
            max_seqlen_q=pack.longest,
            max_seqlen_kv=pack.longest,
            bounds=pack.bounds,
            samples=len(pack.rows),
            sample_of_token=pack.sample_of_token,
            routed=routed,
        )


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a pack. megatron builds it from a layer spec."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any
    ) -> None:
        super().__init__()
        self.scale: float | None = kwargs.get("softmax_scale")
        self.window: int = config.arch.windows[layer_number - 1]
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.arch.sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            unset = torch.full((heads,), math.nan, dtype=config.params_dtype)
            self.softmax_offset = torch.nn.Parameter(unset)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.cp_group: Any = kwargs["pg_collection"].cp
        kv_heads = config.num_query_groups // config.tensor_model_parallel_size
        self.by_heads = kv_heads % self.cp_group.size() == 0

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks, cut over tensor parallel ranks."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return state

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
        size, rank, width = self.cp_group.size(), self.cp_group.rank(), value.shape[-1]
        sinks = self.softmax_offset
        if size > 1:
            query, key, value = self.exchange(query, key, value, bounds)
        if query.is_cuda and query.shape[-1] != width:  # kernels want one width; zeros change no score
            widest = max(width, query.shape[-1])
            query, key, value = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
        if size == 1:
            out = self._attend(query, key, value, packed_seq_params, sinks)[..., :width]
        elif self.by_heads:
            share = None if sinks is None else sinks.chunk(size)[rank]
            out = self._attend(query, key, value, packed_seq_params, share)[..., :width]
            out = heads_to_tokens(out, bounds, self.cp_group)
        else:
            out = _attend_zigzag(query, key, value, self.scale, self.window, sinks, bounds, size, rank)
            out = out[..., :width]
        return out.reshape(out.shape[0], -1)

    def exchange(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What this rank attends with, of its tokens' heads: a share of the heads of the whole pack, or the pack's keys and values."""
        if self.by_heads:
            query, key, value = tokens_to_heads([query, key, value], bounds, self.cp_group)
            return query, key, value
        return (
            query,
            gather_sequences(key, bounds, self.cp_group),
            gather_sequences(value, bounds, self.cp_group),
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, params: PackBounds, sinks: Tensor | None
    ) -> Tensor:
        """Attention within whole sequences: [T, heads, d] -> [T, heads, d]."""
        if has_kernels(query):
            cu, longest = params.cu_seqlens_q, params.max_seqlen_q
            return pack_attention.attend(
                query, key, value, params.bounds, cu, longest, self.scale, self.window, sinks
            )
        return attend_by_length(query, key, value, params.bounds, self.scale, self.window, sinks)


def _attend_zigzag(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int,
    sinks: Tensor | None,
    bounds: tuple[int, ...],
    size: int,
    rank: int,
) -> Tensor:
    """Attention of a rank's two chunks of every sequence to keys before each chunk's end: all, or those in a window."""
    if not has_kernels(query):
        chunks = [
            whole(query[a:b], key[s:e], value[s:e], scale, window, sinks)
            for (a, b), (s, e) in chunk_spans(bounds, size, rank)
        ]
        return torch.cat(chunks)
    index, cu_q, cu_k, longest_q, longest_k = _varlen_chunks(bounds, size, rank, query.device)
    return pack_attention.varlen(
        query, key[index], value[index], cu_q, cu_k, longest_q, longest_k, scale, window, sinks
    )


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


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)
