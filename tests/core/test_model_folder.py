"""A checkpoint folder is read whole: every tensor fits and is taken once, or the folder is refused and the tensor named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from millrace.core.errors import ConfigError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config, resolved
from millrace.core.families.decoder import EMBEDDING, HEAD
from millrace.core.families.registry import BUILT_IN
from millrace.core.families.tensors import kept_tensors, tensor_shapes, weight_tensors
from millrace.core.families.weight_files import INDEX

SIZES: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
LATENT = {
    "num_key_value_heads": 2,
    "head_dim": 2,
    "q_lora_rank": 5,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 7,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "n_group": 1,
    "topk_group": 1,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "head_dim": 8,
}
OTHER_TYPES = {  # how a quantised or wrongly converted tensor is stored
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.float64: "F64",
}
FAMILIES = [family.name for family in BUILT_IN]
READ_TYPES = (torch.float32, torch.float16, torch.bfloat16)

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
GLM4: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0.dev0",
    "use_cache": True,
    "vocab_size": 151552,
}
# of folders at Hugging Face, keys and values as they are there
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "vocab_size": 49152,
    },
    "Mistral-7B-Instruct-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.0.dev0",
        "use_cache": True,
        "vocab_size": 32768,
    },
    "GLM-4-9B-0414": GLM4,
    "GLM-Z1-32B-0414": {
        **GLM4,
        "attention_bias": False,
        "hidden_size": 6144,
        "intermediate_size": 23040,
        "num_attention_heads": 48,
        "num_hidden_layers": 61,
    },
    "gpt-oss-20b": GPT_OSS,
    "gpt-oss-120b": {
        **GPT_OSS,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "Qwen2.5-1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "initializer_range": 0.02,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-Next-80B-A3B-Instruct": {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "DeepSeek-V3, not quantised": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "Kimi-K2-Instruct, not quantised": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 131072,
        "model_type": "kimi_k2",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.48.3",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "Moonlight-16B-A3B": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [154820, 154827, 154829],
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "model_type": "glm4_moe_lite",
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154820,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.0.0rc0",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    published = PUBLISHED[name]
    found = architecture(resolved(published, name))
    assert found.rope_theta == published["rope_theta"]
    assert (found.rope_scaling is None) == (published.get("rope_scaling") is None)
    assert found.eps == published["rms_norm_eps"]
    assert (found.kv_heads, found.tied) == (
        published["num_key_value_heads"],
        published["tie_word_embeddings"],
    )
    assert (
        found.head_dim == published["hidden_size"] // published["num_attention_heads"]
        or {"head_dim", "qk_nope_head_dim"} & published.keys()
    )


PARAMETERS = {  # published, in all digits; without layers that predict further tokens
    "DeepSeek-V3, not quantised": 671_026_419_200,
    "Kimi-K2-Instruct, not quantised": 1_026_408_232_448,
    "Moonlight-16B-A3B": 15_960_110_208,  # its page counts 64 more a layer
    "GLM-4.7-Flash": 29_943_393_920,
    "GLM-4-9B-0414": 9_400_279_040,
    "GLM-Z1-32B-0414": 32_566_081_536,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Llama-3-8B": 8_030_261_248,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "SmolLM2-135M": 134_515_008,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_tensors_have_the_published_number_of_parameters(name: str) -> None:
    arch = architecture(resolved(PUBLISHED[name], name))
    assert sum(math.prod(shape) for shape in tensor_shapes(arch).values()) == PARAMETERS[name]
    assert arch.parameters == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("Mistral-7B-Instruct-v0.3", {}, [0] * 32),
        ("Mistral-7B-Instruct-v0.3", {"sliding_window": 4096}, [4096] * 32),
        ("Qwen2.5-1.5B", {}, [0] * 28),
        ("Qwen2.5-1.5B", {"use_sliding_window": True, "max_window_layers": 21}, [0] * 21 + [131072] * 7),
        ("Qwen3-0.6B", {"use_sliding_window": True, "sliding_window": None}, [0] * 28),
        ("Qwen3-0.6B", {"sliding_window": 0, "max_window_layers": 0}, [0] * 28),
        (
            "Qwen3-0.6B",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"] * 14,
            },
            [0, 9] * 14,
        ),
    ],
)
def test_windows_by_layer(name: str, keys: dict[str, Any], expected: list[int]) -> None:
    assert architecture(resolved({**PUBLISHED[name], **keys}, name)).windows == tuple(expected)


def test_a_window_of_mistrals_that_is_not_said_is_that_of_the_first_ones() -> None:
    config = {
        key: value for key, value in PUBLISHED["Mistral-7B-Instruct-v0.3"].items() if key != "sliding_window"
    }
    assert set(architecture(resolved(config, "test")).windows) == {4096}


NEXT = "Qwen3-Next-80B-A3B-Instruct"
TYPES = ["linear_attention", "full_attention"] * 24


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [layer for layer in range(48) if layer % 4 != 3]),
        ({"full_attention_interval": 2}, list(range(0, 48, 2))),
        ({"full_attention_interval": 1}, []),
        ({"layer_types": TYPES}, list(range(0, 48, 2))),
        ({"layer_types": TYPES, "full_attention_interval": 3}, list(range(0, 48, 2))),
        ({"layer_types": None, "full_attention_interval": 16}, [n for n in range(48) if n % 16 != 15]),
    ],
)
def test_layers_with_delta_net(keys: dict[str, Any], expected: list[int]) -> None:
    assert architecture(resolved({**PUBLISHED[NEXT], **keys}, NEXT)).delta_layers == tuple(expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("full_attention_interval", 0),
        ("full_attention_interval", True),
        ("full_attention_interval", None),
        ("layer_types", ["linear_attention"]),
        ("layer_types", ["sliding_attention"] * 48),
        ("layer_types", "linear_attention"),
        ("linear_num_value_heads", 40),
        ("linear_num_key_heads", 0),
        ("linear_conv_kernel_dim", None),
        ("use_sliding_window", True),
        ("attention_bias", True),
        ("partial_rotary_factor", 2.0),
    ],
)
def test_a_delta_net_that_is_none_here_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config.json(: {key} = | has no {key})"):
        resolved({**PUBLISHED[NEXT], key: value}, "test")


def test_a_token_of_qwen3_next_uses_the_published_number_of_parameters() -> None:
    """3.9 billion, embeddings among them. An engine's cache grows in every fourth layer."""
    arch = architecture(resolved(PUBLISHED[NEXT], "test"))
    assert round((arch.products + arch.embedding) / 1e9, 1) == 3.9
    assert arch.kv_bytes(2, 1, latents=False) == 12 * 2 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("Mistral-7B-Instruct-v0.3", "sliding_window", 0),
        ("Mistral-7B-Instruct-v0.3", "layer_types", ["sliding_attention"] * 32),
        ("Qwen3-0.6B", "use_sliding_window", 1),
        ("Qwen3-0.6B", "sliding_window", "all"),
        ("Qwen3-0.6B", "max_window_layers", None),
        ("Qwen3-0.6B", "layer_types", ["sliding_attention"] * 28),
        ("Qwen3-0.6B", "layer_types", ["full_attention"]),
        ("Qwen3-0.6B", "layer_types", ["chunked_attention"] * 28),
        ("Qwen3-30B-A3B", "use_sliding_window", True),
        ("Llama-3-8B", "sliding_window", 4096),
    ],
)
def test_windows_that_no_layer_here_has_are_refused(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config.json: {key} = "):
        resolved({**PUBLISHED[name], key: value}, "test")


def test_a_token_of_deepseek_v3_uses_the_published_number_of_parameters() -> None:
    """37,552,282,624, norms and biases among them. An engine caches a latent of a token, or its keys and values."""
    arch = architecture(resolved(PUBLISHED["DeepSeek-V3, not quantised"], "test"))
    assert arch.products + arch.embedding == pytest.approx(37_552_282_624, rel=1e-4)
    assert arch.kv_bytes(2, 8, latents=True) == 61 * (512 + 64) * 2
    assert arch.kv_bytes(2, 8, latents=False) == 61 * 16 * (192 + 128) * 2


SIGMOID: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}


def shape_of(family: str, tied: bool = False, **more: Any) -> Any:
    shared = {**EXPERTS, "shared_expert_intermediate_size": 6}
    own: dict[str, Any] = {
        "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2},
        "glm4_moe": {**SIGMOID, "first_k_dense_replace": 1},
        "qwen3_moe": EXPERTS,
        "qwen2_moe": shared,
        "mistral": {"sliding_window": None},
        "qwen3_next": {**shared, **DELTA_NET, "norm_topk_prob": False},
        "qwen3_5_text": DELTA_NET,
        "qwen3_5_moe_text": {**shared, **DELTA_NET, "num_experts_per_tok": 2},
        "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
        "kimi_k2": {**LATENT, "first_k_dense_replace": 1, "q_lora_rank": None},
        "glm4_moe_lite": LATENT,
    }
    config = {"model_type": family, "tie_word_embeddings": tied, **SIZES, **own.get(family, {}), **more}
    return architecture(resolved(config, "test"))


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def refusal(folder: Path, tensors: dict[str, Tensor], shape: Any) -> ConfigError | None:
    """What the folder with these tensors is refused with."""
    save_file(tensors, folder / "model.safetensors")
    try:
        found = weight_tensors(str(folder), shape, "algorithm.teacher")
    except ConfigError as error:
        refused = error
    else:
        assert found.keys() == tensor_shapes(shape).keys()
        return None
    assert refused.where == f"algorithm.teacher = {folder}"
    assert refused.remedy
    return refused


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_missing_changed_or_of_another_type_is_named(tmp_path: Path, family: str) -> None:
    shape = shape_of(family)
    tensors = drawn(tensor_shapes(shape))
    assert refusal(tmp_path, tensors, shape) is None
    for name, tensor in tensors.items():
        missing = {key: value for key, value in tensors.items() if key != name}
        changes = {
            "is missing": missing,
            "has shape": {**tensors, name: tensor[..., 1:].contiguous()},
            f"of this {family} model": {**missing, f"{name}.more": tensor},
        }
        for words, changed in changes.items():
            error = refusal(tmp_path, changed, shape)
            assert error is not None, (name, words)
            assert name in error.reason
            assert words in error.reason
        for dtype, stored_as in OTHER_TYPES.items():
            error = refusal(tmp_path, {**tensors, name: tensor.to(dtype)}, shape)
            assert error is not None, (name, dtype)
            assert f"tensor {name} in model.safetensors is of type {stored_as}" in error.reason
        for dtype in READ_TYPES:
            assert refusal(tmp_path, {**tensors, name: tensor.to(dtype)}, shape) is None


EXTRA: dict[str, Callable[[], dict[str, Tensor]]] = {
    "model.layers.0.self_attn.o_proj.bias": lambda: {"model.layers.0.self_attn.o_proj.bias": torch.zeros(8)},
    "model.layers.0.mlp.up_proj.bias": lambda: {"model.layers.0.mlp.up_proj.bias": torch.zeros(6)},
    "model.layers.2.input_layernorm.weight": lambda: {"model.layers.2.input_layernorm.weight": torch.ones(8)},
    "model.layers.0.self_attn.q_proj.weight_scale_inv": lambda: {
        "model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1)
    },
    "model.layers.0.self_attn.q_proj.lora_A.weight": lambda: {
        "model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(1, 8)
    },
    "score.weight": lambda: {"score.weight": torch.ones(2, 8)},
    "model.layers.0.mlp.experts.gate_up_proj": lambda: {
        "model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 8, 8)
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", EXTRA)
def test_a_tensor_that_no_parameter_takes_is_named(tmp_path: Path, family: str, name: str) -> None:
    shape, extra = shape_of(family), EXTRA[name]()
    known = tensor_shapes(shape)
    error = refusal(tmp_path, {**drawn(known), **extra}, shape)
    if known.get(name) == extra[name].shape:
        assert error is None
        return
    assert error is not None
    assert name in error.reason


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_layers_that_predict_further_tokens_are_kept_if_the_config_names_them(
    tmp_path: Path, family: str
) -> None:
    """Also without a shape of their own here; a layer after them belongs to nobody."""
    tensors = drawn(tensor_shapes(shape_of(family)))
    further = {
        f"model.layers.2.{name}": torch.ones(3) for name in ("eh_proj.weight", "shared_head.norm.weight")
    }
    assert refusal(tmp_path, {**tensors, **further}, shape_of(family)) is not None
    shape = shape_of(family, num_nextn_predict_layers=1)
    assert refusal(tmp_path, {**tensors, **further}, shape) is None
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert kept_tensors(str(tmp_path), shape).keys() == {bias, *further}
    for name in ("model.layers.3.eh_proj.weight", "model.layers.2.input_layernorm.weight"):
        assert refusal(tmp_path, {**tensors, name: torch.ones(3)}, shape) is not None
    assert refusal(tmp_path, tensors, shape) is None


# the key that is named, and what else the file says
CONTRADICTIONS: list[tuple[str, dict[str, Any]]] = [
    ("n_group", {"n_group": 3}),
    ("n_group", {"n_group": 4, "topk_group": 4}),
    ("topk_group", {"topk_group": 2}),
    ("num_experts_per_tok", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}),
    ("num_key_value_heads", {"num_key_value_heads": 1}),
    ("head_dim", {"head_dim": 4}),
    ("qk_head_dim", {"qk_head_dim": 6}),
    ("scoring_func", {"scoring_func": "softmax"}),
    ("topk_method", {"topk_method": "greedy"}),
    (
        "rope_scaling.mscale",
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8, "mscale": 0.5}},
    ),
]


@pytest.mark.parametrize(("key", "said"), CONTRADICTIONS)
def test_sizes_that_contradict_each_other_are_named(key: str, said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"config.json: {key} = "):
        shape_of("deepseek_v3", **said)


def test_kinds_of_layers_are_as_many_as_layers() -> None:
    with pytest.raises(ConfigError, match="config.json: mlp_layer_types = .*: there are 2 layers"):
        shape_of("glm4_moe_lite", mlp_layer_types=["dense"])


def test_biases_of_queries_keys_and_values_belong_to_the_families_that_have_them(tmp_path: Path) -> None:
    """They were ignored in a Llama folder."""
    with_biases = ("qwen2", "qwen2_moe", "glm4", "gpt_oss")
    for family in FAMILIES:
        shape = shape_of(family)
        biases = {
            f"model.layers.{n}.self_attn.{x}_proj.bias": torch.ones(8 if x == "q" else 4)
            for n in (0, 1)
            for x in "qkv"
        }
        error = refusal(tmp_path, {**drawn(tensor_shapes(shape)), **biases}, shape)
        assert (error is None) == (family in with_biases)
    without = shape_of("glm4", attention_bias=False)
    assert refusal(tmp_path, drawn(tensor_shapes(without)), without) is None
    assert refusal(tmp_path, {**drawn(tensor_shapes(without)), **biases}, without) is not None


def test_stored_frequencies_are_left_over_without_harm(tmp_path: Path) -> None:
    shape = shape_of("llama")
    for name in ("model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"):
        assert refusal(tmp_path, {**drawn(tensor_shapes(shape)), name: torch.ones(2)}, shape) is None


def test_a_tied_output_layer_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    shape = shape_of("qwen3", tied=True)
    tensors = drawn(tensor_shapes(shape))
    assert refusal(tmp_path, {**tensors, HEAD: tensors[EMBEDDING].clone()}, shape) is None
    for other in (tensors[EMBEDDING] + 1e-3, tensors[EMBEDDING].bfloat16()):
        error = refusal(tmp_path, {**tensors, HEAD: other}, shape)
        assert error is not None
        assert "tie_word_embeddings" in error.reason


def test_files_and_index_must_agree(tmp_path: Path) -> None:
    shape = shape_of("llama")
    tensors = drawn(tensor_shapes(shape))
    names = list(tensors)
    halves = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    index = {name: file for file, part in halves.items() for name in part}

    def problem(written: dict[str, Any] | None = None, **more: list[str]) -> str:
        for path in tmp_path.glob("*"):
            path.unlink()
        for file, part in {**halves, **{f"{key}.safetensors": part for key, part in more.items()}}.items():
            save_file({name: tensors[name] for name in part}, tmp_path / file)
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": index if written is None else written}))
        try:
            weight_tensors(str(tmp_path), shape)
        except ConfigError as error:
            return error.reason
        return ""

    assert problem() == ""
    assert "lies beside" in problem(model=names[:1])
    assert names[5] in problem(a=names[:6])
    assert "is not in" in problem({**index, "lm_head.bias": "a.safetensors"})
    assert "does not say" in problem({name: file for name, file in index.items() if name != names[0]})
    assert "lack c.safetensors" in problem({**index, names[0]: "c.safetensors"})
    assert "cannot be read" in problem({})
    problem()
    whole = (tmp_path / "b.safetensors").read_bytes()
    for broken in (whole[:-4], whole[:20], b"", b"\xff" * 64):
        (tmp_path / "b.safetensors").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"b\.safetensors is no whole safetensors file"):
            weight_tensors(str(tmp_path), shape)


@pytest.mark.parametrize(
    ("index", "together"),
    [
        ({"weight_map": {"model.layers.0.mlp.experts.gate_up_proj": "a"}}, True),
        ({"weight_map": {"model.layers.0.mlp.experts.0.up_proj.weight": "a"}}, False),
        ({"weight_map": {"mtp.layers.0.mlp.experts.gate_up_proj": "a"}}, False),
        ({"weight_map": 3}, False),
        ([], False),
        (None, False),
    ],
)
def test_names_of_tensors_say_whether_a_checkpoint_stores_experts_together(
    tmp_path: Path, index: Any, together: bool
) -> None:
    family = "qwen3_5_moe_text"
    config = {"model_type": family, **SIZES, **EXPERTS, **DELTA_NET, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "shared_expert_intermediate_size": 6}))
    if index is not None:
        (tmp_path / INDEX).write_text(json.dumps(index))
    arch = architecture(read_hf_config(str(tmp_path)))
    assert arch.experts_together is together
    assert arch.parameters == shape_of(family).parameters
    ends = {name.rpartition("experts.")[2] for name in tensor_shapes(arch) if ".experts." in name}
    assert ends == {"gate_up_proj", "down_proj"} if together else "0.gate_proj.weight" in ends
