"""Maps megatron parameters to Hugging Face tensors: one declarative table for the supported families.

Used in both directions. Owns names, and how tensors are fused and split over tensor parallel ranks. Knows nothing of files
or process groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace.core.families.architecture import Architecture


@dataclass(frozen=True)
class Rule:
    """One kind of parameter.

    `names`: Hugging Face names with {layer} and {expert}. `fuse` makes the whole megatron tensor from the Hugging Face
    tensors, `unfuse` the reverse. `split`: the dimension cut over tensor parallel ranks (None: replicated).
    """

    pattern: str
    names: tuple[str, ...]
    split: int | None
    fuse: Callable[[Sequence[Tensor], Architecture], Tensor] = lambda tensors, _: tensors[0]
    unfuse: Callable[[Tensor, Architecture], list[Tensor]] = lambda tensor, _: [tensor]
    paired: bool = False  # gate and up: cut separately, so that a rank holds [gate shard; up shard]


def _fuse_qkv(tensors: Sequence[Tensor], arch: Architecture) -> Tensor:
    """Per kv group: its query heads, then its key head, then its value head."""
    q, k, v = (t.reshape(arch.kv_heads, -1, arch.head_dim, *t.shape[1:]) for t in tensors)
    return torch.cat([q, k, v], dim=1).reshape(-1, *tensors[0].shape[1:])


def _unfuse_qkv(tensor: Tensor, arch: Architecture) -> list[Tensor]:
    per_group = arch.heads // arch.kv_heads
    rest = tensor.shape[1:]
    grouped = tensor.reshape(arch.kv_heads, per_group + 2, arch.head_dim, *rest)
    return [piece.reshape(-1, *rest) for piece in grouped.split([per_group, 1, 1], dim=1)]


def _fuse_pair(tensors: Sequence[Tensor], arch: Architecture) -> Tensor:
    return torch.cat(list(tensors))


def _unfuse_pair(tensor: Tensor, arch: Architecture) -> list[Tensor]:
    return list(tensor.chunk(2))


_LAYER = "model.layers.{layer}"
RULES = (
    Rule(r"embedding\.word_embeddings\.weight", ("model.embed_tokens.weight",), 0),
    Rule(r"output_layer\.weight", ("lm_head.weight",), 0),
    Rule(r"decoder\.final_layernorm\.weight", ("model.norm.weight",), None),
    Rule(
        r"decoder\.layers\.(?P<layer>\d+)\.input_layernorm\.weight",
        (f"{_LAYER}.input_layernorm.weight",),
        None,
    ),
    Rule(
        r"decoder\.layers\.(?P<layer>\d+)\.pre_mlp_layernorm\.weight",
        (f"{_LAYER}.post_attention_layernorm.weight",),
        None,
    ),
    Rule(
        r"decoder\.layers\.(?P<layer>\d+)\.self_attention\.linear_qkv\.(?P<kind>weight|bias)",
        tuple(f"{_LAYER}.self_attn.{x}_proj.{{kind}}" for x in "qkv"),
        0,
        _fuse_qkv,
        _unfuse_qkv,
    ),
    Rule(
        r"decoder\.layers\.(?P<layer>\d+)\.self_attention\.q_layernorm\.weight",
        (f"{_LAYER}.self_attn.q_norm.weight",),
        None,
    ),
    Rule(
        r"decoder\.layers\.(?P<layer>\d+)\.self_attention\.k_layernorm\.weight",
        (f"{_LAYER}.self_attn.k_norm.weight",),
        None,
    ),
    Rule(
        r"decoder\.layers\.(?P<layer>\d+)\.self_attention\.linear_proj\.weight",
        (f"{_LAYER}.self_attn.o_proj.weight",),
        1,
    ),
    Rule(
        r"decoder\.layers\.(?P<layer>\d+)\.mlp\.linear_fc1\.weight",
        (f"{_LAYER}.mlp.gate_proj.weight", f"{_LAYER}.mlp.up_proj.weight"),
        0,
        _fuse_pair,
        _unfuse_pair,
        paired=True,
    ),
    Rule(r"decoder\.layers\.(?P<layer>\d+)\.mlp\.linear_fc2\.weight", (f"{_LAYER}.mlp.down_proj.weight",), 1),
    Rule(r"decoder\.layers\.(?P<layer>\d+)\.mlp\.router\.weight", (f"{_LAYER}.mlp.gate.weight",), None),
    Rule(
        r"decoder\.layers\.(?P<layer>\d+)\.mlp\.experts\.local_experts\.(?P<expert>\d+)\.linear_fc1\.weight",
        (
            f"{_LAYER}.mlp.experts.{{expert}}.gate_proj.weight",
            f"{_LAYER}.mlp.experts.{{expert}}.up_proj.weight",
        ),
        0,
        _fuse_pair,
        _unfuse_pair,
        paired=True,
    ),
    Rule(
        r"decoder\.layers\.(?P<layer>\d+)\.mlp\.experts\.local_experts\.(?P<expert>\d+)\.linear_fc2\.weight",
        (f"{_LAYER}.mlp.experts.{{expert}}.down_proj.weight",),
        1,
    ),
)


@dataclass(frozen=True)
class Mapping:
    """The Hugging Face tensors of which one parameter of this rank is a shard."""

    rule: Rule
    names: tuple[str, ...]
    expert: bool

    def local(
        self, tensors: Sequence[Tensor], arch: Architecture, rank: int, size: int, padded_vocab: int
    ) -> Tensor:
        """This rank's shard, from whole Hugging Face tensors."""
        split = self.rule.split
        if split is None or size == 1:
            whole = self.rule.fuse(tensors, arch)
            return _pad(whole, padded_vocab) if self.vocabulary else whole
        if self.rule.paired:
            return torch.cat([tensor.chunk(size, split)[rank] for tensor in tensors])
        whole = self.rule.fuse(tensors, arch)
        if self.vocabulary:
            whole = _pad(whole, padded_vocab)
        return whole.chunk(size, split)[rank]

    def whole(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        """Whole Hugging Face tensors, from the shards of all tensor parallel ranks in order. With one shard, views if possible."""
        split = self.rule.split
        if split is None or len(shards) == 1:
            full = shards[0]
        elif self.rule.paired:
            halves = [shard.chunk(2) for shard in shards]
            return [torch.cat([half[i] for half in halves], split) for i in range(2)]
        else:
            full = torch.cat(list(shards), split)
        if self.vocabulary:
            full = full[: arch.vocab]
        return self.rule.unfuse(full, arch)

    @property
    def vocabulary(self) -> bool:
        """Whether the first dimension is the vocabulary."""
        return self.names[0] in ("model.embed_tokens.weight", "lm_head.weight")


def lookup(name: str, *, layer_offset: int, expert_offset: int, tied: bool) -> Mapping:
    """The mapping of a megatron parameter. Numbers in the name count from the rank's first layer and expert."""
    for rule in RULES:
        match = re.fullmatch(rule.pattern, name)
        if not match:
            continue
        values: dict[str, Any] = match.groupdict()
        if "layer" in values:
            values["layer"] = int(values["layer"]) + layer_offset
        if "expert" in values:
            values["expert"] = int(values["expert"]) + expert_offset
        names = tuple(text.format(**values) for text in rule.names)
        if tied and names == ("lm_head.weight",):
            names = ("model.embed_tokens.weight",)
        return Mapping(rule, names, "expert" in values)
    raise AssertionError(f"no rule for megatron parameter {name}")


def _pad(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return tensor if not missing else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
