"""Multi-head latent attention over packs, as DeepSeek-V3 has it (arXiv:2412.19437, section 2.1.1).

Keys and values of all heads are projected from one latent of a token; a small part of each key, the same for all heads, holds
its position. Names of parameters are megatron's. Its own module splits the projections to latents over tensor parallel ranks, and
then loses gradients of the keys' positions; here these projections, which are small, are whole on each rank.

Context parallel ranks exchange latents instead of the keys and values of heads, which are wider: each rank projects the keys and values of
the heads with which it attends from the latents of the whole pack.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from millrace.connectors.trainers.context_parallel import gather_sequences, tokens_to_heads
from millrace.connectors.trainers.megatron.model.attention import PackBounds, PackedAttention
from millrace.connectors.trainers.megatron.model.layers import Norm, OverPacks
from millrace.connectors.trainers.ops import fused
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


class LatentCore(PackedAttention):
    """The core attention over what `PackedLatentAttention.heads` has exchanged between context parallel ranks."""

    def exchange(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See PackedAttention. Nothing is left to exchange."""
        return query, key, value


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

    def heads(
        self, hidden_states: Tensor, table: Tensor, params: PackBounds
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See OverPacks. What rotates comes first in a head, which changes no score."""
        arch = self.arch
        if arch.q_rank:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        else:
            query, _ = self.linear_q_proj(hidden_states)
        query = query.squeeze(1).unflatten(-1, (-1, arch.head_dim)).roll(arch.rotary, -1)
        query = fused.rotate(query, table, arch.interleaved)
        latent, position = self.linear_kv_down_proj(hidden_states).split([arch.kv_rank, arch.rotary], dim=-1)
        latent = self.kv_layernorm(latent.contiguous())
        if self.pg_collection.cp.size() > 1:
            return self._over_context(query, latent, position, table, tuple(params.bounds))
        both, _ = self.linear_kv_up_proj(latent)
        position = fused.rotate(self._for_own_heads(position), table, arch.interleaved)
        return query, *self._keys_and_values(both.squeeze(1), position)

    def _over_context(
        self, query: Tensor, latent: Tensor, position: Tensor, table: Tensor, bounds: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's share of the heads over the whole pack, in the pack's order.

        If the heads do not divide evenly: the queries of its tokens, and keys and values of all heads over the whole pack.
        """
        arch, group, weight = self.arch, self.pg_collection.cp, self.linear_kv_up_proj.weight
        # what rotates stands first, as in a head
        local = self._for_own_heads(torch.cat([position, latent], dim=-1))
        whole = gather_sequences(fused.rotate(local, table, arch.interleaved), bounds, group)
        if self.core_attention.by_heads:
            (query,) = tokens_to_heads([query], bounds, group)
            weight = weight.chunk(group.size())[group.rank()]
        position, latent = whole.split([arch.rotary, arch.kv_rank], dim=-1)
        return query, *self._keys_and_values(F.linear(latent, weight).squeeze(1), position)

    def _for_own_heads(self, x: Tensor) -> Tensor:
        """[T, 1, d] of all tokens. Backward sums over tensor parallel ranks, whose heads each give a part of the gradient."""
        over = (
            gather_from_sequence_parallel_region
            if self.config.sequence_parallel
            else copy_to_tensor_model_parallel_region
        )
        out: Tensor = over(x, group=self.pg_collection.tp)
        return out

    def _keys_and_values(self, both: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, heads, d] of the up projection's output [T, ...] and the keys' positions [T, 1, rotary]."""
        still, width = self.arch.head_dim - self.arch.rotary, self.arch.value_dim
        key, value = both.unflatten(-1, (-1, still + width)).split([still, width], -1)
        return torch.cat([position.expand(-1, key.shape[1], -1), key], dim=-1), value
