"""Tiny models of every supported family, with random weights that the same arguments repeat."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

CLASSES = {
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "llama": "Llama",
    "mistral": "Mistral",
    "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm4": "Glm4",
    "gpt_oss": "GptOss",
    "glm4_moe": "Glm4Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
}
# published checkpoints, which also see pictures, and the family of their language model
SEEING = {"qwen3_5_moe": "qwen3_5_moe_text"}
TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 8, "num_position_embeddings": 4}

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}
GLM4_MOE = {
    "num_attention_heads": 6,
    "head_dim": 12,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
DELTA_NET = {
    "num_attention_heads": 6,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
QWEN3_NEXT = {
    **DELTA_NET,
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
}
# as wide as the experts, so that shapes tell no orientation; gates reach the limit
GPT_OSS = {
    "hidden_size": 40,
    "num_attention_heads": 6,
    "head_dim": 16,
    "intermediate_size": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 3,
    "swiglu_limit": 0.5,
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
    },
}


def know_kimi() -> None:
    """Have transformers take Kimi K2 as the DeepSeek-V3 that it is: its own class is remote code."""
    import transformers
    from transformers import conversion_mapping as conversion

    if "kimi_k2" in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        return
    config = type("KimiConfig", (transformers.DeepseekV3Config,), {"model_type": "kimi_k2"})
    model = type("KimiForCausalLM", (transformers.DeepseekV3ForCausalLM,), {"config_class": config})
    transformers.AutoConfig.register("kimi_k2", config)
    transformers.AutoModelForCausalLM.register(config, model)
    of_deepseek = conversion.get_checkpoint_conversion_mapping("deepseek_v3")
    conversion.register_checkpoint_conversion_mapping("kimi_k2", of_deepseek)


def sizes_of(family: str, vocab: int) -> dict[str, Any]:
    """The configuration of a family's tiny model."""
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
    if family == "gpt_oss":
        values |= GPT_OSS
    if family == "glm4_moe":
        values |= GLM4_MOE
    if family == "qwen3_next":
        values |= QWEN3_NEXT
    if family == "qwen3_5_text":
        values |= DELTA_NET
    if family == "qwen3_5_moe_text":
        values |= QWEN3_NEXT
        del values["intermediate_size"], values["norm_topk_prob"]
    if family == "mistral":
        values |= {"sliding_window": None}
    if family in ("deepseek_v3", "kimi_k2", "glm4_moe_lite"):
        values |= LATENT
    if family == "deepseek_v3":
        # groups of which the best two experts count, where megatron takes another number of them
        values |= {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    if family == "kimi_k2":
        values |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "v_head_dim": 18}
    if family == "glm4_moe_lite":
        values |= {"q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False}
    return values


def save_tiny_model(folder: Path, family: str, vocab: int, **changes: Any) -> Path:
    """Write a checkpoint of two layers; `changes` are laid over its configuration. Returns the folder."""
    import torch
    import transformers

    form, family = family, SEEING.get(family, family)
    values = {**sizes_of(family, vocab), **changes}
    kind = getattr(
        transformers, f"{CLASSES[family]}{'ForConditionalGeneration' if form in SEEING else 'ForCausalLM'}"
    )
    if form in SEEING:
        tower = {**TOWER, "out_hidden_size": values["hidden_size"]}
        values = {
            "text_config": values,
            "vision_config": tower,
            "tie_word_embeddings": values["tie_word_embeddings"],
        }
    torch.manual_seed(1)
    made = kind(kind.config_class(**values))
    with torch.no_grad():  # norms and biases start at 1 and 0, which would hide a mix-up
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.02 * torch.randn_like(buffer))  # scores differ by as much
    made.save_pretrained(folder)
    if form in SEEING:
        stack_experts(folder)
    if family == "kimi_k2":
        know_kimi()
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"model_type": family}))
    return folder


def stacked(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a checkpoint with the experts of each layer together, as published Qwen3.5 has them and transformers writes them not."""
    import torch

    apart = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
    made, layers = dict(tensors), dict[str, dict[tuple[int, str], Any]]()
    for match in [match for match in map(apart.fullmatch, tensors) if match]:
        layers.setdefault(match[1], {})[int(match[2]), match[3]] = made.pop(match[0])
    for layer, each in layers.items():
        every = range(len(each) // 3)
        both = [torch.cat([each[n, "gate"], each[n, "up"]]) for n in every]
        made[f"{layer}gate_up_proj"] = torch.stack(both)
        made[f"{layer}down_proj"] = torch.stack([each[n, "down"] for n in every])
    return made


def stack_experts(folder: Path) -> None:
    """Store the experts of each layer of a folder together."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(stacked(load_file(path)), path, metadata={"format": "pt"})


def save_mxfp4_model(folder: Path, vocab: int) -> Path:
    """A tiny gpt-oss whose experts are stored as published ones are, with random numbers. Returns the folder."""
    import torch
    from safetensors.torch import load_file, save_file

    save_tiny_model(folder, "gpt_oss", vocab, hidden_size=32, intermediate_size=64, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(2)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, rows = tensors.pop(name).shape
        shape = (experts, rows, width // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantised}))
    return folder
