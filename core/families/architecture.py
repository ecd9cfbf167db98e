"""The model that a config.json describes: its sizes, and what follows from them in parameters and operations.

Knows nothing of files and tensors: config_file.py and tensors.py read those. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.core.families.family import ModelPart
from millrace.core.families.registry import family_named
from millrace.core.families.rope_scaling import KINDS, RotaryScaling


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    tied: bool
    eps: float  # epsilon of the norms
    rope_theta: float
    rotary: int  # dimensions of a head that rotate
    interleaved: bool  # whether neighbouring dimensions rotate together
    rope_scaling: RotaryScaling | None
    experts: int  # 0: dense
    expert_ffn: int
    experts_used: int  # by a token
    shared_ffn: int  # of the expert that every token uses, behind a gate; 0: none
    norm_topk: bool  # whether the weights of a token's experts sum to 1
    qkv_bias: bool  # whether queries, keys and values have biases
    qk_norm: bool  # whether queries and keys are normalised, head by head
    branch_norms: bool  # whether a layer also has norms after attention and after the feed-forward part

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that shapes of tensors are made of, by the names that a family's parts use."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "q": q,
            "kv": kv,
            "head_dim": self.head_dim,
            "ffn": self.ffn,
            "gate_up": 2 * self.ffn,
            "expert_ffn": self.expert_ffn,
            "shared_ffn": self.shared_ffn,
            "experts": self.experts,
            "one": 1,
        }

    def has(self, part: ModelPart) -> bool:
        """Whether the model has a part of its family."""
        return not part.when or bool(getattr(self, part.when))

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an output layer that is not tied to it."""
        return self.vocab * self.hidden

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp(self) -> int:
        """Parameters of one layer's dense MLP, or of one expert."""
        return 3 * self.hidden * (self.expert_ffn if self.experts else self.ffn)

    @property
    def norms(self) -> int:
        """Parameters of one layer's norms, without those of heads."""
        return self.hidden * (4 if self.branch_norms else 2)

    @property
    def layer(self) -> int:
        """Parameters of one layer, without biases and the norms of heads."""
        return self.attention + self.shared + self.mlp * max(1, self.experts) + self.norms

    @property
    def shared(self) -> int:
        """Parameters of one layer's router, and of its shared expert with its gate."""
        gate = self.hidden if self.shared_ffn else 0
        return self.experts * self.hidden + 3 * self.hidden * self.shared_ffn + gate

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        outer = self.embedding * (1 if self.tied else 2) + self.hidden
        return self.layers * self.layer + outer

    def flops(self, tokens: int) -> int:
        """Operations of a forward pass over one sequence: products with weights, and causal attention, which is quadratic."""
        layer = self.attention + self.shared + self.mlp * max(1, self.experts_used)
        scores = self.layers * self.heads * self.head_dim * tokens**2
        return 2 * (tokens * (self.layers * layer + self.embedding) + scores)

    def kv_bytes(self, bytes_each: int) -> int:
        """Bytes of KV cache a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_each


def architecture(hf: Mapping[str, Any]) -> Architecture:
    """The sizes in a config.json that was read by `read_hf_config`."""
    experts, family = hf.get("num_experts", 0), family_named(hf["model_type"])
    return Architecture(
        family=family.name,
        layers=hf["num_hidden_layers"],
        hidden=hf["hidden_size"],
        ffn=hf["intermediate_size"],
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        vocab=hf["vocab_size"],
        positions=hf["max_position_embeddings"],
        tied=hf["tie_word_embeddings"],
        eps=hf["rms_norm_eps"],
        rope_theta=hf["rope_theta"],
        rotary=int(hf["head_dim"] * hf.get("partial_rotary_factor", 1.0)),
        interleaved=family.interleaved,
        rope_scaling=_scaling(hf.get("rope_scaling")),
        experts=experts,
        expert_ffn=hf["moe_intermediate_size"] if experts else 0,
        experts_used=hf["num_experts_per_tok"] if experts else 0,
        shared_ffn=hf.get("shared_expert_intermediate_size", 0),
        norm_topk=experts > 0 and hf["norm_topk_prob"],
        qkv_bias=hf.get("attention_bias", family.has("linear_qkv.bias")),
        qk_norm=family.has("q_layernorm.weight"),
        branch_norms=family.has("post_mlp_layernorm.weight"),
    )


def _scaling(read: Mapping[str, Any] | None) -> RotaryScaling | None:
    if read is None:
        return None
    return KINDS[read["rope_type"]](**{name: value for name, value in read.items() if name != "rope_type"})
