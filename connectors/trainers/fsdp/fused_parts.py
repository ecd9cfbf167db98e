"""Parts of transformers' models that are computed in one pass over memory, as `ops.fused` defines them, if the family is known.

Owns which classes of transformers have the plain form of a norm, a gated MLP and rotary positions. Others stay as they are.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from millrace.connectors.trainers import patches
from millrace.connectors.trainers.fsdp.attention import rows
from millrace.connectors.trainers.ops import fused

# before the class names of each: x / rms(x) * weight, and down(silu(gate(x)) * up(x))
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "DeepseekV3")
# of these, attention rotates halves of whole heads, in transposed order
ROTATED = tuple(family for family in FAMILIES if family != "DeepseekV3")


def fuse(model: Module) -> None:
    """Have the known parts of a model computed so, in this process: rotary positions are a function of transformers' module."""
    part: Any
    for part in model.modules():
        name = type(part).__name__
        if name in {f"{family}RMSNorm" for family in FAMILIES}:
            part.forward = partial(_norm, part)
        elif name in {f"{family}MLP" for family in FAMILIES} and part.config.hidden_act == "silu":
            part.forward = partial(_mlp, part)
        elif name in {f"{family}Attention" for family in ROTATED}:
            patches.rotate_heads_by(sys.modules[type(part).__module__], _rotated)


def _norm(part: Any, hidden: Tensor) -> Tensor:
    return fused.rms_norm(hidden, part.weight, part.variance_epsilon)


def _mlp(part: Any, hidden: Tensor) -> Tensor:
    out: Tensor = part.down_proj(fused.silu_product(part.gate_proj(hidden), part.up_proj(hidden)))
    return out


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [1, heads, T, d] rotated by angles whose cosines and sines [1, T, d] have equal halves."""
    half = cos.shape[-1] // 2
    table = torch.stack([cos[0, :, :half], sin[0, :, :half]])
    rotated = [fused.rotate(rows(x), table).transpose(0, 1)[None] for x in (q, k)]
    return rotated[0], rotated[1]
