"""Multi-head latent attention over packs, as DeepSeek-V3 has it (arXiv:2412.19437, section 2.1.1).

Keys and values of all heads are projected from one latent of a token; a small part of each key, the same for all heads, holds
its position. Names of parameters are megatron's. Its own module splits the projections to latents over tensor parallel ranks, and
then loses gradients of the keys' positions; here these projections, which are small, are whole on each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from millrace.connectors.trainers.megatron.model import fused
from millrace.connectors.trainers.megatron.model.layers import Norm, OverPacks
from millrace.core.families.architecture import Architecture
from millrace.core.families.decoder import LATENT_EPS


class WholeLinear(torch.nn.Linear):
    """A projection of a rank's own tokens whose weight each tensor parallel rank has."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(
            inputs, outputs, bias=False, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        assert config.init_method is not None
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedLatentAttention(OverPacks):
    """Self-attention whose keys and values come from a latent, and whose queries may."""

    def __init__(
        self,
        config: Any,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        arch: Architecture = config.arch
        self.arch = arch
        sizes, hidden = arch.sizes(), arch.hidden
        if arch.q_rank:
            self.linear_q_down_proj = WholeLinear(config, hidden, arch.q_rank)
            self.q_layernorm = Norm(config, arch.q_rank, LATENT_EPS)
            self.linear_q_up_proj = self._split(submodules.linear_q_up_proj, arch.q_rank, sizes["q"])
        else:
            self.linear_q_proj = self._split(submodules.linear_q_proj, hidden, sizes["q"])
        self.linear_kv_down_proj = WholeLinear(config, hidden, sizes["kv_down"])
        self.kv_layernorm = Norm(config, arch.kv_rank, LATENT_EPS)
        self.linear_kv_up_proj = self._split(submodules.linear_kv_up_proj, arch.kv_rank, sizes["kv_up"])

    def _split(self, spec: Any, inputs: int, outputs: int) -> Any:
        """A projection to this rank's heads."""
        return build_module(
            spec,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )

    def get_query_key_value_tensors(self, *_: Any, **__: Any) -> Any:
        """megatron wants it; `heads` stands for it."""
        raise AssertionError("the forward pass over packs calls heads")

    def heads(self, hidden_states: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See OverPacks. What rotates comes first in a head, which changes no score."""
        arch = self.arch
        still = arch.head_dim - arch.rotary
        if arch.q_rank:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        else:
            query, _ = self.linear_q_proj(hidden_states)
        latent, position = self.linear_kv_down_proj(hidden_states).split([arch.kv_rank, arch.rotary], dim=-1)
        if self.config.sequence_parallel:
            position = gather_from_sequence_parallel_region(position, group=self.pg_collection.tp)
        else:  # each rank's heads give a part of its gradient
            position = copy_to_tensor_model_parallel_region(position, group=self.pg_collection.tp)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(latent.contiguous()))
        query = query.squeeze(1).unflatten(-1, (-1, arch.head_dim))
        key, value = (
            both.squeeze(1).unflatten(-1, (-1, still + arch.value_dim)).split([still, arch.value_dim], -1)
        )
        query, position = (
            fused.rotate(x, table, arch.interleaved) for x in (query.roll(arch.rotary, -1), position)
        )
        return query, torch.cat([position.expand(-1, key.shape[1], -1), key], dim=-1), value
