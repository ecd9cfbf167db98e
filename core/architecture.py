"""The shape of a Hugging Face checkpoint as its config.json tells it, and which ones can be trained.

Owns the list of supported families and what of a config.json would silently be another model here; counts parameters.
Knows nothing of tensors. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError

WHOLE = "take a whole checkpoint"
SUPPORTED = ("qwen3", "qwen3_moe", "qwen2", "llama")
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


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
    experts: int  # 0: dense
    expert_ffn: int
    experts_used: int  # by a token

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
    def layer(self) -> int:
        """Parameters of one layer."""
        router = self.experts * self.hidden
        return self.attention + router + self.mlp * max(1, self.experts) + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        outer = self.embedding * (1 if self.tied else 2) + self.hidden
        return self.layers * self.layer + outer

    def flops(self, tokens: int) -> int:
        """Operations of a forward pass over one sequence: products with weights, and causal attention, which is quadratic."""
        router = self.experts * self.hidden
        layer = self.attention + router + self.mlp * max(1, self.experts_used)
        scores = self.layers * self.heads * self.head_dim * tokens**2
        return 2 * (tokens * (self.layers * layer + self.embedding) + scores)

    def kv_bytes(self, bytes_each: int) -> int:
        """Bytes of KV cache a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_each


def read_hf_config(folder: str, field: str = "model.path") -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises ConfigError naming the field that named the folder."""
    path, where = Path(folder) / "config.json", f"{field} = {folder}"
    try:
        config: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", where=where, remedy=WHOLE) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no object", where=where, remedy=WHOLE)
    if config.get("model_type") not in SUPPORTED:
        raise ConfigError(
            f"model_type {config.get('model_type')!r} is not supported",
            where=where,
            remedy=f"supported: {', '.join(SUPPORTED)}",
        )
    missing = [name for name in NEEDED if not isinstance(config.get(name), int)]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(missing)}", where=where, remedy=WHOLE)
    for what in unsupported(config):
        raise ConfigError(f"{what} in config.json is not supported", where=where, remedy="take another model")
    return config


def unsupported(hf: dict[str, Any]) -> Iterator[str]:
    """What a config asks for that would silently be another model here."""
    rope = hf.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or hf.get("rope_scaling"):
        yield "scaled rotary embedding (rope_type, rope_scaling)"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor"
    if hf.get("use_sliding_window"):
        yield "use_sliding_window"
    if hf.get("hidden_act", "silu") != "silu":
        yield f"hidden_act = {hf['hidden_act']}"
    for name in ("attention_bias", "mlp_bias"):
        if hf.get(name):
            yield name
    if hf["model_type"] == "qwen3_moe" and (
        hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1
    ):
        yield "layers without experts (mlp_only_layers, decoder_sparse_step)"


def expert_count(hf: dict[str, Any]) -> int:
    """Experts of a mixture-of-experts layer; 0 for a dense model. transformers 5 writes the field by another name."""
    if hf["model_type"] != "qwen3_moe":
        return 0
    return int(hf.get("num_experts") or hf["num_local_experts"])


def architecture(hf: dict[str, Any]) -> Architecture:
    """The sizes that a config.json tells."""
    heads = hf["num_attention_heads"]
    experts = expert_count(hf)
    return Architecture(
        family=hf["model_type"],
        layers=hf["num_hidden_layers"],
        hidden=hf["hidden_size"],
        ffn=hf["intermediate_size"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        vocab=hf["vocab_size"],
        positions=hf["max_position_embeddings"],
        tied=bool(hf.get("tie_word_embeddings", False)),
        experts=experts,
        expert_ffn=hf["moe_intermediate_size"] if experts else 0,
        experts_used=hf["num_experts_per_tok"] if experts else 0,
    )
