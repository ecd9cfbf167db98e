"""Tiny models of every supported family, with random weights that the same arguments repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CLASSES = {
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "llama": "Llama",
    "mistral": "Mistral",
    "glm4": "Glm4",
}


def save_tiny_model(folder: Path, family: str, vocab: int, **changes: Any) -> Path:
    """Write a checkpoint of two layers; `changes` are laid over its configuration. Returns the folder."""
    import torch
    import transformers

    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if family == "qwen3_moe":
        values |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    if family == "qwen2_moe":
        values |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": False,
        }
    if family == "glm4":
        values |= {
            "hidden_size": 40,
            "intermediate_size": 52,
            "num_attention_heads": 6,
            "head_dim": 12,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "pad_token_id": None,
            "eos_token_id": 1,
        }
    if family == "mistral":
        values |= {"sliding_window": None}
    config = getattr(transformers, f"{CLASSES[family]}Config")(**{**values, **changes})
    torch.manual_seed(1)
    made = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config)
    with torch.no_grad():  # norms and biases start at 1 and 0, which would hide a mix-up
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return folder
