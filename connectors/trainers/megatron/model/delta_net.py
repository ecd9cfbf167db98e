"""Gated delta net over packs, as Qwen3-Next has it (arXiv:2412.06464), instead of a layer's self-attention.

Names of parameters are megatron's, whose own module needs kernels that a CPU does not have. Each tensor parallel rank has some of
the key heads, and the value heads that they serve. Context parallel ranks exchange heads for tokens: a rank computes whole
sequences with its share of the heads.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from millrace.connectors.trainers.context_parallel import heads_to_tokens, tokens_to_heads
from millrace.connectors.trainers.megatron.model.attention import PackBounds
from millrace.connectors.trainers.megatron.model.delta_rule import gated_delta_rule, short_convolution
from millrace.connectors.trainers.megatron.model.layers import Norm
from millrace.core.families.decoder import PROJECTED
from millrace.core.families.delta_net import DeltaNet


class Convolution(torch.nn.Module):
    """The weight of a convolution by channel [channels, 1, tokens]. Its name is megatron's."""

    def __init__(self, config: Any, channels: int, tokens: int) -> None:
        super().__init__()
        self.weight = _unset(config, channels, 1, tokens)


class PackedDeltaNet(MegatronModule):
    """A layer's gated delta net. megatron builds it from a layer spec, as an attention."""

    def __init__(self, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__(config)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.delta = delta = _of_ranks(config.arch.delta, self.tp_group.size())
        whole, options = config.arch.delta, {"config": config, "bias": False, "tp_group": self.tp_group}
        rows = whole.channels + whole.values + 2 * whole.value_heads
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, rows, init_method=config.init_method, gather_output=False, **options
        )
        self.conv1d = Convolution(config, delta.channels, delta.kernel)
        self.A_log = _unset(config, delta.value_heads)
        self.dt_bias = _unset(config, delta.value_heads)
        self.out_norm = Norm(config, delta.value_dim, config.layernorm_epsilon)
        self.out_proj = RowParallelLinear(
            whole.values, config.hidden_size, init_method=config.output_layer_init_method,
            input_is_parallel=True, skip_bias_add=True, **options,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *_: Any,
        packed_seq_params: PackBounds | None = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] -> [T, 1, H], and no bias. Positions are not used: order is in the memory."""
        assert packed_seq_params is not None, "only packed sequences are supported"
        d, bounds = self.delta, tuple(packed_seq_params.bounds)
        mixed = self.in_proj(hidden_states)[0].squeeze(1)
        sizes = [d.keys, d.keys, d.values, d.values, d.value_heads, d.value_heads]
        query, key, value, gate, beta, alpha = mixed.split(sizes, dim=-1)
        parts = [query, key, value, beta, alpha]
        ranks = self.cp_group.size()
        if ranks > 1:
            by_head = torch.cat([x.unflatten(-1, (d.key_heads, -1)) for x in parts], dim=-1)
            (by_head,) = tokens_to_heads([by_head], bounds, self.cp_group)
            widths = [x.shape[-1] // d.key_heads for x in parts]
            parts = [x.flatten(1) for x in by_head.split(widths, dim=-1)]
        out = self._remembered(parts, _of_ranks(d, ranks), bounds)
        if ranks > 1:
            out = heads_to_tokens(out, bounds, self.cp_group).flatten(1, 2)
        gate = gate.unflatten(-1, (d.value_heads, -1))
        gated = self.out_norm(out) * F.silu(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        projected: tuple[Tensor, Tensor | None] = self.out_proj(gated.to(mixed.dtype).flatten(1)[:, None])
        return projected

    def _remembered(self, parts: Sequence[Tensor], d: DeltaNet, bounds: tuple[int, ...]) -> Tensor:
        """What this rank's heads read of whole sequences [T, heads, dv]. parts: queries, keys, values, betas and decays."""
        *channels, beta, alpha = parts
        weights = self.conv1d.weight.split([self.delta.keys, self.delta.keys, self.delta.values])
        weight = torch.cat([self._own(each) for each in weights])
        mixed = F.silu(short_convolution(torch.cat(channels, dim=-1), weight, bounds))
        query, key, value = mixed.split([d.keys, d.keys, d.values], dim=-1)
        wide = torch.promote_types(mixed.dtype, torch.float32)
        rate = self._own(self.A_log).to(wide).exp()
        decay = -rate * F.softplus(alpha.to(wide) + self._own(self.dt_bias).to(wide))
        return gated_delta_rule(
            query.unflatten(-1, (d.key_heads, -1)),
            key.unflatten(-1, (d.key_heads, -1)),
            value.unflatten(-1, (d.value_heads, -1)),
            decay,
            beta.to(wide).sigmoid(),
            bounds,
        )

    def _own(self, weight: Tensor) -> Tensor:
        """The share of the heads with which this context parallel rank computes."""
        own: Tensor = weight.chunk(self.cp_group.size())[self.cp_group.rank()]
        return own

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """Parameters cut over tensor parallel ranks, under megatron's names: each piece of a projection has one."""
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        own["conv1d.weight"] = self.conv1d.weight
        axes = dict.fromkeys(own, 0)
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets)
        for name, part in self.named_children():
            if part is not self.conv1d:
                state |= sharded_state_dict_default(
                    part, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
        sizes = self.delta.sizes(self.delta.layers[0])
        pieces = {name: sizes[size] for name, size in PROJECTED.items()}
        for name, count in (("in_proj.weight", len(pieces)), ("conv1d.weight", 3)):
            state[prefix + name] = _apart(state[prefix + name], dict(list(pieces.items())[:count]))
        return state


def _apart(whole: ShardedTensor, pieces: dict[str, int]) -> ShardedTensorFactory:
    """A parameter whose pieces, one after the other, are each stored as a tensor. pieces: rows by name."""
    bare = whole.without_data()

    @torch.no_grad()
    def stored(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        assert flattened_range is None, "parameters are stored in their shape"
        described = replace(bare, key=key, data=tensor, dtype=tensor.dtype, replica_id=replica_id)
        found, start = [], 0
        for name, rows in pieces.items():
            (piece,) = described.narrow(0, start, rows)
            piece.key = f"{key}.{name}"
            found.append(piece)
            start += rows
        return found

    return ShardedTensorFactory(whole.key, whole.data, stored, torch.cat, whole.replica_id)


def _of_ranks(delta: DeltaNet, ranks: int) -> DeltaNet:
    """The heads of one of so many ranks."""
    return replace(delta, key_heads=delta.key_heads // ranks, value_heads=delta.value_heads // ranks)


def _unset(config: Any, *shape: int) -> torch.nn.Parameter:
    """A parameter that is cut over tensor parallel ranks, NaN until it is loaded."""
    device = torch.cuda.current_device()
    made = torch.nn.Parameter(torch.full(shape, math.nan, dtype=config.params_dtype, device=device))
    set_tensor_model_parallel_attributes(made, True, 0, 1)
    return made
