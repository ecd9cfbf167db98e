"""Causal attention within each sequence of a pack by PyTorch's SDPA, in any type and on any device: one call for all sequences of a length.

A sink is a logit that each head has beside the logits of its keys. Knows nothing of models.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 8  # dimensions by which heads grow for a sink, as PyTorch's kernels want them


def attend_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Sequence[int],
    scale: float | None,
    window: int,
    sinks: Tensor | None,
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
        out = _attention(q, k, v, scale, window, sinks)
        pieces.append(out.transpose(1, 2).flatten(0, 1))
        done += tokens
    return torch.cat(pieces).index_select(0, torch.argsort(order))


def whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a sequence, or of its last queries: [q, heads, d] x [k, kv_heads, d] -> [q, heads, d], causal, ends aligned."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return _attention(q, k, v, scale, window, sinks).squeeze(0).transpose(0, 1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int, sinks: Tensor | None
) -> Tensor:
    """PyTorch's attention [B, heads, q, d] of the last queries, causal, ends aligned. window: as in Architecture.windows.

    sinks: [heads].
    """
    queries, keys, mask = q.shape[2], k.shape[2], None
    if queries != keys or 0 < window < keys or sinks is not None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if window:
            mask = mask.triu(keys - queries - window + 1)
    width = v.shape[-1]
    if sinks is not None:
        scale = scale or q.shape[-1] ** -0.5
        q, k, v, mask = _with_sink_key(q, k, v, mask, sinks / scale)
    # on a GPU, PyTorch's grouped heads in a wide type would take memory for every pair of tokens
    if q.is_cuda:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out: Tensor = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=not q.is_cuda
    )
    return out[..., :width]


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, products: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with one more key, which gives each head's product [heads] and has zeros as its value.

    A further dimension of the queries holds the products; of the keys, only the new one has it.
    """
    assert mask is not None
    q, k, v = F.pad(q, (0, ALIGNED)), F.pad(k, (0, ALIGNED, 0, 1)), F.pad(v, (0, ALIGNED, 0, 1))
    of_key = F.one_hot(torch.tensor(k.shape[-1] - ALIGNED, device=k.device), k.shape[-1]).to(k.dtype)
    of_query = of_key * products.to(q.dtype)[:, None, None]
    return (
        q + of_query,
        torch.cat([k[..., :-1, :], k[..., -1:, :] + of_key], dim=-2),
        v,
        F.pad(mask, (0, 1), value=True),
    )
