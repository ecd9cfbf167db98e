"""Causal attention within each sequence of a pack, on a GPU in a 16-bit type.

cuDNN for long sequences, PyTorch's variable-length flash attention for the rest, and for windows and sinks. A sink is a logit of each
head beside those of the keys: a key that every token attends to and that has no value. Knows nothing of models.
"""

import inspect
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from millrace.connectors.trainers.ops import dense_attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Sequence[int],
    starts: Tensor,
    longest: int,
    scale: float | None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [T, heads, d] of queries [T, heads, d] with keys and values [T, kv heads, d].

    bounds: where sequences start, and the end; starts: the same as int32 on the device. longest: tokens of the longest. scale: of
    scores; None: d ** -0.5. window: keys that a query sees, itself included; 0: all. sinks: [heads].
    """
    if dense_attention.usable(query) and not window and sinks is None:
        return dense_attention.attend(
            query, key, value, bounds, scale, varlen=short, dense=dense_attention.cudnn
        )
    return varlen(query, key, value, starts, starts, longest, longest, scale, window, sinks)


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
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of concatenated sequences of any lengths. Queries belong to the last keys of a sequence. GPU only."""
    from torch.nn.attention.varlen import varlen_attn

    if sinks is not None:
        with_sinks: Tensor = _SinkAttention.apply(
            query, key, value, sinks, (cu_q, cu_k, longest_q, longest_k), scale, window
        )
        return with_sinks
    extra: dict[str, Any] = {"enable_gqa": True} if _takes_gqa() else {}
    out: Any = varlen_attn(
        query, key, value, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=(window - 1, 0), **extra
    )
    attended: Tensor = out
    return attended


class _SinkAttention(torch.autograd.Function):
    """Variable-length flash attention with sinks. Exact: the sink enters the sum of exponentials that both passes share."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        bounds: tuple[Tensor, Tensor, int, int],
        scale: float | None,
        window: int,
    ) -> Tensor:
        ctx.options = {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}
        ctx.bounds = bounds
        out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *bounds, 0.0, not window, return_debug_mask=False, **ctx.options
        )
        both = torch.logaddexp(lse, sinks.float()[:, None])  # [heads, T]
        share = (lse - both).exp().t()[..., None]  # of the sum that the keys have
        weighed: Tensor = (out * share).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, weighed, both)
        return weighed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, both = ctx.saved_tensors
        grad = grads[0].contiguous()
        state = torch.zeros((2,), dtype=torch.uint64, device=query.device)  # of dropout
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, both, *ctx.bounds, 0.0, ctx.options["window_size_left"] < 0,
            state, torch.empty(0, device=query.device), **ctx.options,
        )  # fmt: skip
        weights = (sinks.float()[:, None] - both).exp()
        of_sinks = -(weights * (grad.float() * out.float()).sum(-1).t()).sum(1)
        return dq, dk, dv, of_sinks.to(sinks.dtype), None, None, None


@lru_cache
def _takes_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
