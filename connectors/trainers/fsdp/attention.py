"""Attention over a pack, as transformers' models call it.

`ops.pack_attention` computes 16-bit types on a GPU, and is told the bounds of samples. transformers' own form over SDPA computes
everything else: it makes a mask of positions that start again. Knows nothing of models.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from millrace.connectors.trainers.ops import pack_attention
from millrace.core.errors import TrainerError

NAME = "millrace_packed"  # among transformers' attention functions
HALF = (torch.bfloat16, torch.float16)
# what models give to an attention function beside its tensors, that this one does not compute
UNKNOWN = ("softcap", "s_aux", "position_bias")


def register() -> str:
    """Let transformers know the function; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask_unless_packed(sdpa_mask))
    return NAME


def sdpa_mask_unless_packed(sdpa_mask: Any) -> Any:
    """transformers' mask for SDPA; none where `packed_attention` gets the bounds of samples, since a mask takes T * T bytes."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        if dtype in HALF and device is not None and torch.device(device).type == "cuda":
            return None
        return sdpa_mask(*args, **kwargs)

    return mask


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
    for name in UNKNOWN:
        if given.get(name) is not None:
            raise TrainerError(
                f"the model's attention has {name}, which trainer.kind=fsdp does not compute for packs",
                where="model.path",
                remedy="take another model, or trainer.kind=megatron if it knows the family",
            )
    if attention_mask is not None or starts is None or query.dtype not in HALF or not query.is_cuda:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        given |= {"dropout": 0.0}
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **given)
        return out, None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = pack_attention.attend(q, k, v, bounds, starts, longest, scaling, sliding_window or 0)
    return out[None], None
