"""The parts of the model's layers that differ from megatron's: residuals, norms, activation and self-attention over packs.

Owns which operations share a pass over memory (see `fused`). Parameters and their names are megatron's.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from millrace.connectors.trainers.megatron.model.attention import PackBounds
from millrace.connectors.trainers.megatron.model.replayed_router import PackRouter
from millrace.connectors.trainers.ops import fused
from millrace.connectors.trainers.ops.fused import drop


class Norm(torch.nn.RMSNorm):
    """RMSNorm that marks its weight for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def scale(self) -> Tensor:
        """What is multiplied with."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * scale."""
        assert self.eps is not None
        return fused.rms_norm(x, self.scale, self.eps)


class CentredNorm(Norm):
    """A norm whose weight is stored less 1."""

    @property
    def scale(self) -> Tensor:
        """The weight plus 1, in float32 at least: near 1, bfloat16 would lose most of a small weight's bits."""
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))


class PackedLayer(TransformerLayer):
    """A layer whose residual sums and norms share one pass over memory, as do their gradients.

    Selective recomputation drops the outputs of norms and activation, which are recomputed without a matrix product.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.drops = config.recompute_granularity == "selective" and not config.recompute_modules
        self.activations = [part for part in self.mlp.modules() if isinstance(part, GatedSilu)]
        for activation in self.activations:
            activation.drops = self.drops

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *arguments: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackBounds | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """[T, 1, H] -> [T, 1, H]. Uses megatron's forward pass if trainer.megatron makes it recompute parts of a layer."""
        if isinstance(self.mlp, MoELayer) and isinstance(self.mlp.router, PackRouter):
            self.mlp.router.bounds = packed_seq_params
        if self.recompute_input_layernorm or self.recompute_pre_mlp_layernorm or self.recompute_mlp:
            out: tuple[Tensor, None] = super().forward(
                hidden_states, attention_mask, *arguments,
                rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **more,
            )  # fmt: skip
            return out
        first, second = self.input_layernorm, self.pre_mlp_layernorm
        scales = first.scale, second.scale
        normed, residual = fused.add_norm(hidden_states, None, scales[0], first.eps)
        attended, bias = self.self_attention(
            normed, attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        if bias is not None:
            attended = attended + bias
        if self.drops:
            drop(normed, partial(fused.rms_norm, residual.detach(), scales[0], first.eps), attended)
        normed, residual = fused.add_norm(residual, attended, scales[1], second.eps)
        mlp_out: Tensor = self.mlp(normed)[0]
        if self.drops:
            drop(normed, partial(fused.rms_norm, residual.detach(), scales[1], second.eps), mlp_out)
            for activation in self.activations:
                activation.drop(mlp_out)
        return residual + mlp_out, None


class BranchNormLayer(PackedLayer):
    """A layer that also normalises what its attention and its MLP give, before that is added to the residual."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.post_self_attn_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        # hooks, since megatron's own forward pass must have the norms too
        self.self_attention.register_forward_hook(self._attended)
        self.mlp.register_forward_hook(self._fed)

    def _attended(self, _part: Any, _inputs: Any, out: tuple[Tensor, Tensor | None]) -> tuple[Tensor, None]:
        assert out[1] is None, "biases of output projections are not supported"
        return self.post_self_attn_layernorm(out[0]), None

    def _fed(self, _part: Any, _inputs: Any, out: tuple[Tensor, Tensor | None]) -> tuple[Tensor, None]:
        assert out[1] is None, "biases of output projections are not supported"
        return self.post_mlp_layernorm(out[0]), None


class GatedSilu(MegatronModule):
    """The activation of a gated MLP: silu of the gate and the product, in one pass."""

    form = staticmethod(fused.gated_silu)
    limit: float | None = None  # of a clamped gate

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.drops = False
        self._last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 h] -> [..., h]."""
        out = self.form(x)
        if self.drops:
            self._last = x.detach(), out
        return out

    def drop(self, before: Tensor) -> None:
        """Free the last output until the gradient of `before` arrives. Grouped experts have none: they keep no activation."""
        if self._last is None:
            return
        (x, out), self._last = self._last, None
        drop(out, partial(self.form, x), before)


class ClampedGate(GatedSilu):
    """The activation of a clamped gated MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.limit = config.arch.swiglu_limit
        self.form = partial(fused.clamped_gate, limit=self.limit)


class OverPacks(Attention):
    """The forward pass of self-attention over a pack; a subclass makes the heads.

    `rotary_pos_emb` holds the cosines and sines of this rank's tokens [2, T, d / 2], computed by PolicyModel.
    """

    def heads(self, hidden_states: Tensor, table: Tensor, params: PackBounds) -> tuple[Tensor, ...]:
        """Queries [T, heads, d], keys [T, groups, d] and values [T, groups, dv] of [T, 1, H], as the core attention takes them.

        With an output gate, its logits [T, heads, dv] are the last.
        """
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *_: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackBounds | None = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] -> [T, 1, H], and the projection's bias."""
        assert rotary_pos_emb is not None, "only rotary positions are supported"
        assert packed_seq_params is not None, "only packed sequences are supported"
        query, key, value, *gate = self.heads(hidden_states, rotary_pos_emb, packed_seq_params)
        if self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(
                query, key, value, attention_mask,
                attn_mask_type=self.attn_mask_type, attention_bias=None, packed_seq_params=packed_seq_params,
            )  # fmt: skip
        else:
            out = self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        if gate:
            out = out * gate[0].reshape(out.shape).sigmoid()
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(out.reshape(out.shape[0], 1, -1))
        return projected


class PackedSelfAttention(OverPacks, SelfAttention):
    """Self-attention over a pack, with split, norms and rotary positions of the heads in one pass."""

    def heads(self, hidden_states: Tensor, table: Tensor, params: PackBounds) -> tuple[Tensor, ...]:
        """See OverPacks."""
        groups, tensor = self.config.num_query_groups, self.config.tensor_model_parallel_size
        gated: bool = self.config.attention_output_gate
        if groups < tensor:  # a group's heads are on several ranks, and megatron gathers them
            query, key, value, *gate = self.get_query_key_value_tensors(hidden_states, output_gate=gated)
            # it may give the gates of all heads of the group
            share, number = query.shape[2], self.pg_collection.tp.rank() % (tensor // groups)
            return (
                fused.rotate(query.squeeze(1), table, self.config.rotary_interleaved),
                fused.rotate(key.squeeze(1), table, self.config.rotary_interleaved),
                value.squeeze(1),
                *(x if x.shape[2] == share else x[:, :, number * share : (number + 1) * share] for x in gate),
            )
        mixed, _ = self.linear_qkv(
            hidden_states
        )  # [T, 1, ...]: squeezed, since the gradient of indexing would be a copy
        return fused.query_key_value(
            mixed.squeeze(1),
            getattr(self.q_layernorm, "scale", None),
            getattr(self.k_layernorm, "scale", None),
            table,
            per_group=self.num_attention_heads_per_partition // self.num_query_groups_per_partition,
            head_dim=self.hidden_size_per_attention_head,
            eps=self.config.layernorm_epsilon,
            interleaved=self.config.rotary_interleaved,
            gated=gated,
        )
