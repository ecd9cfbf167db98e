"""Attention over a pack, as transformers' models call it.

`ops.pack_attention` computes 16-bit types on a GPU, and gets the bounds of samples. transformers' own form over SDPA computes
everything else: it makes a mask of positions that start again.

Context parallel ranks hold other tokens of the same samples. They exchange heads for tokens, so that each attends over whole samples
with its share of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.1). Fewer heads of keys than ranks are repeated first.
Knows nothing of models.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from millrace.connectors.trainers.context_parallel import heads_to_tokens, tokens_to_heads
from millrace.connectors.trainers.ops import pack_attention
from millrace.connectors.trainers.ops.sequence_attention import attend_by_length
from millrace.core.errors import TrainerError

PACKED = "millrace_packed"  # among transformers' attention functions
EXCHANGED = "millrace_exchanged"
KINDS = {"full_attention", "sliding_attention"}  # of layers, that both compute as transformers does
HALF = (torch.bfloat16, torch.float16)
# what models give to an attention function beside its tensors, that this one does not compute
UNKNOWN = ("softcap", "s_aux", "position_bias")
_UNTOLD = TrainerError(
    "the model does not tell its attention where the samples of a pack start",
    where="model.path",
    remedy="take another model, or trainer.kind=megatron if it knows the family",
)


def register() -> None:
    """Let transformers know the functions of this module."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, sdpa_mask_unless_packed(sdpa_mask))
    AttentionInterface.register(EXCHANGED, exchanged_attention)
    AttentionMaskInterface.register(EXCHANGED, lambda *_, **__: None)


def sdpa_mask_unless_packed(sdpa_mask: Any) -> Any:
    """transformers' mask for SDPA; none where `packed_attention` gets the bounds of samples, since a mask takes T * T bytes."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        if dtype in HALF and device is not None and torch.device(device).type == "cuda":
            return None
        return sdpa_mask(*args, **kwargs)

    return mask


def rows(heads: Tensor) -> Tensor:
    """[T, heads, d] of [1, heads, T, d]."""
    # not heads[0]: the backward pass of a choice fills a tensor with zeros and copies into it
    return heads.squeeze(0).transpose(0, 1)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    bounds: Sequence[int] = (),
    starts: Tensor | None = None,
    longest: int = 0,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention [1, T, heads, d] of queries [1, heads, T, d] with keys and values [1, kv heads, T, d], causal in each sample.

    bounds: where each sample starts, and the end; starts: the same as int32 on the device. longest: tokens of the longest sample.
    Raises TrainerError if the model asks for a kind of attention that is not computed here.
    """
    _check_known(given)
    if attention_mask is not None or query.dtype not in HALF or not query.is_cuda:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        given |= {"dropout": 0.0}
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **given)
        return out, None
    if starts is None:
        raise _UNTOLD
    q, k, v = (rows(x) for x in (query, key, value))
    out = pack_attention.attend(q, k, v, bounds, starts, longest, scaling, sliding_window or 0)
    return out[None], None


def exchanged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    bounds: Sequence[int] = (),
    starts: Tensor | None = None,
    longest: int = 0,
    context: Any = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` of this rank's tokens: queries [1, heads, T / cp, d] in zigzag order, each over its whole sample.

    context: the group of context parallel ranks; otherwise as `packed_attention`.
    """
    _check_known(given)
    assert attention_mask is None, "no mask is made for the tokens of one rank"
    if starts is None or context is None:
        raise _UNTOLD
    size, whole = context.size(), tuple(bounds)
    q, k, v = (rows(x) for x in (query, key, value))
    times = size // gcd(k.shape[1], size)
    k, v = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (k, v))
    if v.shape[-1] == k.shape[-1]:
        q, k, v = tokens_to_heads([q, k, v], whole, context)
    else:
        q, k = tokens_to_heads([q, k], whole, context)
        (v,) = tokens_to_heads([v], whole, context)
    if q.is_cuda and q.dtype in HALF:
        out = pack_attention.attend(q, k, v, bounds, starts, longest, scaling, sliding_window or 0)
    else:
        out = attend_by_length(q, k, v, bounds, scaling, sliding_window or 0, None)
    return heads_to_tokens(out, whole, context).flatten(1, 2)[None], None


def _check_known(given: dict[str, Any]) -> None:
    for name in UNKNOWN:
        if given.get(name) is not None:
            raise TrainerError(
                f"the model's attention has {name}, which trainer.kind=fsdp does not compute for packs",
                where="model.path",
                remedy="take another model, or trainer.kind=megatron if it knows the family",
            )
