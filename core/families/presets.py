"""Published models: the keys of config.json that shape them, layouts, and how their authors answer with them.

Facts only; core/config/model_preset.py uses them. A layout is for trainer and engines on the same GPUs, in bfloat16 with the
default lengths. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class PresetLayout:
    """How a model is split over GPUs. engine: GPUs of one engine. options: of trainer.megatron."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    engine: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelPreset:
    """A published model.

    `model`: its name on Hugging Face. `config`: the keys of its config.json that shape it. `layouts`: the smallest number of GPUs
    first. `sampling`: how its authors answer with it; training samples at temperature 1. `notes`: what to know of its chat
    template, and of serving it. `also`: other values of its keys, in checkpoints of the same sizes.
    """

    model: str
    config: Mapping[str, Any]
    layouts: tuple[PresetLayout, ...]
    sampling: str
    notes: str
    also: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def layout(self, gpus: int | None) -> PresetLayout | None:
        """The layout for so many GPUs: the largest one whose GPUs divide them, since more GPUs hold more copies; None if none does.

        Without a number, the smallest layout.
        """
        fit = [layout for layout in self.layouts if gpus is not None and gpus % layout.gpus == 0]
        return self.layouts[0] if gpus is None else fit[-1] if fit else None


def _qwen2(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        **_sizes(layers, hidden, ffn, heads, kv_heads, vocab),
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": hidden <= 2048,
    }


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        **_sizes(layers, hidden, ffn, heads, kv_heads, 151936),
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": hidden <= 2560,
    }


def _qwen3_moe(layers: int, hidden: int, ffn: int, heads: int, expert_ffn: int) -> dict[str, Any]:
    return {
        **_qwen3(layers, hidden, ffn, heads, 4),
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_ffn,
        "norm_topk_prob": True,
    }


def _qwen3_next() -> dict[str, Any]:
    return {
        "model_type": "qwen3_next",
        **_sizes(48, 2048, 5120, 16, 2, 151936),
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


def _qwen3_5(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, value_heads: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5",
        "intermediate_size": ffn,
        **_qwen3_5_attention(layers, hidden, heads, kv_heads, value_heads),
        "tie_word_embeddings": hidden <= 2560,
    }


def _qwen3_5_moe(
    layers: int, hidden: int, heads: int, value_heads: int, experts: int, used: int, expert_ffn: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe",
        **_qwen3_5_attention(layers, hidden, heads, 2, value_heads),
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": expert_ffn,
        "shared_expert_intermediate_size": expert_ffn,
        "tie_word_embeddings": False,
    }


def _qwen3_5_attention(
    layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 248320,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-6,
    }


def _llama(layers: int, hidden: int, ffn: int, heads: int, factor: float, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        **_sizes(layers, hidden, ffn, heads, 8, 128256),
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }


def _glm4(layers: int, hidden: int, ffn: int, heads: int, bias: bool) -> dict[str, Any]:
    return {
        "model_type": "glm4",
        **_sizes(layers, hidden, ffn, heads, 2, 151552),
        "head_dim": 128,
        "attention_bias": bias,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def _deepseek(
    model_type: str, layers: int, hidden: int, ffn: int, heads: int, vocab: int, q_lora: int | None
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        **_sizes(layers, hidden, ffn, heads, heads, vocab),
        "q_lora_rank": q_lora,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "tie_word_embeddings": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }


def _sigmoid_experts(
    experts: int,
    used: int,
    ffn: int,
    dense: int,
    shared: int,
    scale: float,
    groups: int = 1,
    of_groups: int = 1,
) -> dict[str, Any]:
    """Experts that a sigmoid router with a bias chooses. dense: first layers without any; shared: experts of every token."""
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": ffn,
        "first_k_dense_replace": dense,
        "n_shared_experts": shared,
        "routed_scaling_factor": scale,
        "norm_topk_prob": True,
        "n_group": groups,
        "topk_group": of_groups,
    }


def _yarn(factor: float, beta_fast: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def _kimi(factor: float, eps: float, positions: int) -> dict[str, Any]:
    return {
        **_deepseek("kimi_k2", 61, 7168, 18432, 64, 163840, 1536),
        **_sigmoid_experts(384, 8, 2048, 1, 1, 2.827),
        "max_position_embeddings": positions,
        "rope_theta": 50000.0,
        "rope_scaling": _yarn(factor, 1.0),
        "rms_norm_eps": eps,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        **_sizes(layers, 2880, 2880, 64, 8, 201088),
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def _glm4_moe(
    layers: int, dense: int, hidden: int, ffn: int, experts: int, expert_ffn: int, scale: float, qk_norm: bool
) -> dict[str, Any]:
    return {
        "model_type": "glm4_moe",
        **_sizes(layers, hidden, ffn, 96, 8, 151552),
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": qk_norm,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **_sigmoid_experts(experts, 8, expert_ffn, dense, 1, scale),
        "num_nextn_predict_layers": 1,
    }


def _sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


_L = PresetLayout

QWEN25_SAMPLING = "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05"
QWEN25_TEMPLATE = "No thinking. Calls are Hermes' JSON. Without a system message it writes one of its own."
QWEN3_SAMPLING = "temperature 0.6, top_p 0.95, top_k 20; without thinking temperature 0.7, top_p 0.8"
QWEN3_TEMPLATE = (
    "Thinking is on unless chat_template_kwargs has enable_thinking: false. It drops the thinking of earlier turns: "
    "give model.chat_template one that keeps it for dialogues of several turns. Calls are Hermes' JSON."
)
QWEN3_2507 = "temperature 0.7, top_p 0.8, top_k 20"
QWEN3_INSTRUCT_TEMPLATE = "No thinking. Calls are Hermes' JSON."
QWEN35_SAMPLING = "temperature 1.0, top_p 0.95, top_k 20; without thinking temperature 0.7, top_p 0.8"
QWEN35_NOTES = "chat_template_kwargs sets enable_thinking. Calls are Qwen3-Coder's XML. It also sees pictures, which no row may have."
LLAMA_SAMPLING = "temperature 0.6, top_p 0.9"
LLAMA_TEMPLATE = "No thinking. Calls are JSON with `parameters`, one a turn."
GLM4_SAMPLING = "GLM-Z1: temperature 0.6, top_p 0.95, top_k 40"
GLM4_TEMPLATE = (
    "Only GLM-Z1 thinks, after a prompt that ends with <think>. Calls are a name, a line and JSON, which are not read: "
    "give the tokenizer a response_template."
)
OWN_TOKENIZER = "Its tokenizer is code, which is not run: give model.tokenizer a folder with tokenizer.json."
DEEPSEEK_SAMPLING = "temperature 0.6, top_p 0.95"
DEEPSEEK_NOTES = (
    "V3.1 thinks if chat_template_kwargs has thinking: true, R1 always; earlier thinking is dropped. In bfloat16 an engine "
    "takes 16 GPUs of 141 GB or 32 of 80 GB, and engines.nodes is set for hosts of 8."
)
KIMI_NOTES = (
    "Only K2-Thinking thinks. A call's id is functions.NAME:NUMBER, and its answer names it. In bfloat16 an engine takes 32 GPUs of "
    f"141 GB, and engines.nodes is set for hosts of 8. {OWN_TOKENIZER}"
)
GLM45_NOTES = (
    "Thinking is on unless chat_template_kwargs has enable_thinking: false; before messages of the user earlier thinking is dropped. "
    "Calls are keys and values in tags."
)
GPT_OSS_SAMPLING = "temperature 1.0, top_p 1.0"
GPT_OSS_NOTES = (
    "Thinking is the channel analysis; chat_template_kwargs sets reasoning_effort. One call a turn. The last answer of a dialogue ends "
    "otherwise than earlier ones: with messages of the user after turns set rollout.session.history: append."
)


def _first(layers: int) -> dict[str, int]:
    return {"num_layers_in_first_pipeline_stage": layers}


PRESETS: dict[str, ModelPreset] = {
    "llama3.1-8b": ModelPreset(
        "meta-llama/Llama-3.1-8B-Instruct",
        _llama(32, 4096, 14336, 32, 8.0, tied=False),
        (
            _L(2, tensor=2, recompute="full"),
            _L(4, tensor=2),
        ),
        LLAMA_SAMPLING,
        LLAMA_TEMPLATE,
    ),
    "llama3.2-3b": ModelPreset(
        "meta-llama/Llama-3.2-3B-Instruct",
        _llama(28, 3072, 8192, 24, 32.0, tied=True),
        (
            _L(1, recompute="selective"),
            _L(2),
        ),
        LLAMA_SAMPLING,
        LLAMA_TEMPLATE + " It writes today's date, unless chat_template_kwargs has date_string.",
    ),
    "mistral-7b": ModelPreset(
        "mistralai/Mistral-7B-Instruct-v0.3",
        {
            "model_type": "mistral",
            **_sizes(32, 4096, 14336, 32, 8, 32768),
            "sliding_window": None,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        (_L(1, recompute="full"), _L(2, tensor=2, recompute="full"), _L(4, tensor=2)),
        "none is named",
        "No thinking. Calls are a list of JSON, with ids of nine characters.",
    ),
    "qwen1.5-moe-a2.7b": ModelPreset(
        "Qwen/Qwen1.5-MoE-A2.7B-Chat",
        {
            **_qwen2(24, 2048, 5632, 16, 16, 151936),
            "model_type": "qwen2_moe",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
        },
        (_L(2, tensor=2, recompute="full"), _L(4, tensor=4)),
        QWEN25_SAMPLING,
        "No thinking, and no calls.",
    ),
    "qwen2.5-0.5b": ModelPreset(
        "Qwen/Qwen2.5-0.5B-Instruct",
        _qwen2(24, 896, 4864, 14, 2, 151936),
        (_L(1),),
        QWEN25_SAMPLING,
        QWEN25_TEMPLATE,
    ),
    "qwen2.5-1.5b": ModelPreset(
        "Qwen/Qwen2.5-1.5B-Instruct",
        _qwen2(28, 1536, 8960, 12, 2, 151936),
        (_L(1),),
        QWEN25_SAMPLING,
        QWEN25_TEMPLATE,
        {"max_position_embeddings": (131072,)},
    ),
    "qwen2.5-3b": ModelPreset(
        "Qwen/Qwen2.5-3B-Instruct",
        _qwen2(36, 2048, 11008, 16, 2, 151936),
        (
            _L(1, recompute="full"),
            _L(2),
        ),
        QWEN25_SAMPLING,
        QWEN25_TEMPLATE,
    ),
    "qwen2.5-7b": ModelPreset(
        "Qwen/Qwen2.5-7B-Instruct",
        _qwen2(28, 3584, 18944, 28, 4, 152064),
        (
            _L(2, tensor=2, recompute="full"),
            _L(4, tensor=2),
        ),
        QWEN25_SAMPLING,
        QWEN25_TEMPLATE,
        {"max_position_embeddings": (131072,)},
    ),
    "qwen2.5-32b": ModelPreset(
        "Qwen/Qwen2.5-32B-Instruct",
        _qwen2(64, 5120, 27648, 40, 8, 152064),
        (
            _L(8, tensor=4, engine=2),
            _L(16, tensor=8, engine=2),
        ),
        QWEN25_SAMPLING,
        QWEN25_TEMPLATE,
        {"max_position_embeddings": (131072,), "rms_norm_eps": (1e-5,)},
    ),
    "qwen3-0.6b": ModelPreset(
        "Qwen/Qwen3-0.6B",
        _qwen3(28, 1024, 3072, 16, 8),
        (_L(1),),
        QWEN3_SAMPLING,
        QWEN3_TEMPLATE,
        {"max_position_embeddings": (32768,)},
    ),
    "qwen3-1.7b": ModelPreset(
        "Qwen/Qwen3-1.7B",
        _qwen3(28, 2048, 6144, 16, 8),
        (_L(1),),
        QWEN3_SAMPLING,
        QWEN3_TEMPLATE,
        {"max_position_embeddings": (32768,)},
    ),
    "qwen3-4b": ModelPreset(
        "Qwen/Qwen3-4B",
        _qwen3(36, 2560, 9728, 32, 8),
        (
            _L(1, recompute="full"),
            _L(2, recompute="selective"),
            _L(4),
        ),
        QWEN3_SAMPLING,
        QWEN3_TEMPLATE,
        {"max_position_embeddings": (32768,)},
    ),
    "qwen3-4b-instruct-2507": ModelPreset(
        "Qwen/Qwen3-4B-Instruct-2507",
        {**_qwen3(36, 2560, 9728, 32, 8), "rope_theta": 5e6, "max_position_embeddings": 262144},
        (
            _L(1, recompute="full"),
            _L(2, recompute="selective"),
            _L(4),
        ),
        QWEN3_2507,
        QWEN3_INSTRUCT_TEMPLATE,
    ),
    "qwen3-8b": ModelPreset(
        "Qwen/Qwen3-8B",
        _qwen3(36, 4096, 12288, 32, 8),
        (
            _L(2, recompute="selective"),
            _L(4, tensor=2),
        ),
        QWEN3_SAMPLING,
        QWEN3_TEMPLATE,
        {"max_position_embeddings": (32768,)},
    ),
    "qwen3-14b": ModelPreset(
        "Qwen/Qwen3-14B",
        _qwen3(40, 5120, 17408, 40, 8),
        (
            _L(4, tensor=4, recompute="full"),
            _L(8, tensor=4),
        ),
        QWEN3_SAMPLING,
        QWEN3_TEMPLATE,
        {"max_position_embeddings": (32768,)},
    ),
    "qwen3-32b": ModelPreset(
        "Qwen/Qwen3-32B",
        _qwen3(64, 5120, 25600, 64, 8),
        (
            _L(8, tensor=4, engine=2),
            _L(16, tensor=8, engine=2),
        ),
        QWEN3_SAMPLING,
        QWEN3_TEMPLATE,
    ),
    "qwen3-30b-a3b": ModelPreset(
        "Qwen/Qwen3-30B-A3B",
        _qwen3_moe(48, 2048, 6144, 32, 768),
        (_L(8, tensor=2, expert=8, engine=2, recompute="full"),),
        QWEN3_SAMPLING,
        QWEN3_TEMPLATE,
        {"max_position_embeddings": (32768, 262144), "rope_theta": (1e7,)},
    ),
    "qwen3-235b-a22b": ModelPreset(
        "Qwen/Qwen3-235B-A22B",
        _qwen3_moe(94, 4096, 12288, 64, 1536),
        (_L(64, pipeline=2, expert=16, engine=8, recompute="full"),),
        QWEN3_SAMPLING,
        QWEN3_TEMPLATE,
        {"max_position_embeddings": (262144,), "rope_theta": (5e6,)},
    ),
    "qwen3-next-80b-a3b": ModelPreset(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _qwen3_next(),
        (
            _L(16, tensor=2, expert=16, engine=4, recompute="full"),
            _L(32, tensor=2, expert=32, engine=4, recompute="full"),
        ),
        QWEN3_2507,
        QWEN3_INSTRUCT_TEMPLATE,
    ),
    "qwen3.5-0.8b": ModelPreset(
        "Qwen/Qwen3.5-0.8B",
        _qwen3_5(24, 1024, 3584, 8, 2, 16),
        (_L(1),),
        QWEN35_SAMPLING,
        QWEN35_NOTES,
    ),
    "qwen3.5-4b": ModelPreset(
        "Qwen/Qwen3.5-4B",
        _qwen3_5(32, 2560, 9216, 16, 4, 32),
        (_L(1, recompute="full"), _L(2, tensor=2, recompute="full"), _L(4, tensor=2)),
        QWEN35_SAMPLING,
        QWEN35_NOTES,
    ),
    "qwen3.5-9b": ModelPreset(
        "Qwen/Qwen3.5-9B",
        _qwen3_5(32, 4096, 12288, 16, 4, 32),
        (_L(2, tensor=2, recompute="full"), _L(4, tensor=2, recompute="full"), _L(8, tensor=2)),
        QWEN35_SAMPLING,
        QWEN35_NOTES,
    ),
    "qwen3.5-27b": ModelPreset(
        "Qwen/Qwen3.5-27B",
        _qwen3_5(64, 5120, 17408, 24, 4, 48),
        (_L(8, tensor=4, engine=2, recompute="full"), _L(16, tensor=4, engine=2, recompute="full")),
        QWEN35_SAMPLING,
        QWEN35_NOTES,
    ),
    "qwen3.5-35b-a3b": ModelPreset(
        "Qwen/Qwen3.5-35B-A3B",
        _qwen3_5_moe(40, 2048, 16, 32, 256, 8, 512),
        (
            _L(8, tensor=2, expert=8, engine=2, recompute="full"),
            _L(16, tensor=2, expert=16, engine=2, recompute="full"),
        ),
        QWEN35_SAMPLING,
        QWEN35_NOTES,
    ),
    "qwen3.5-397b-a17b": ModelPreset(
        "Qwen/Qwen3.5-397B-A17B",
        _qwen3_5_moe(60, 4096, 32, 64, 512, 10, 1024),
        (
            _L(128, tensor=2, pipeline=2, expert=32, engine=16, recompute="full"),
            _L(256, tensor=2, pipeline=4, expert=64, engine=16, recompute="full"),
        ),
        QWEN35_SAMPLING,
        QWEN35_NOTES,
    ),
    "glm4-9b": ModelPreset(
        "zai-org/GLM-4-9B-0414",
        _glm4(40, 4096, 13696, 32, bias=True),
        (_L(2, tensor=2), _L(4, tensor=2, recompute="selective"), _L(8, tensor=2)),
        GLM4_SAMPLING,
        GLM4_TEMPLATE,
    ),
    "glm4-32b": ModelPreset(
        "zai-org/GLM-4-32B-0414",
        _glm4(61, 6144, 23040, 48, bias=False),
        (_L(8, tensor=4, engine=2), _L(16, tensor=8, engine=2)),
        GLM4_SAMPLING,
        GLM4_TEMPLATE,
    ),
    "glm4.7-flash": ModelPreset(
        "zai-org/GLM-4.7-Flash",
        {
            **_deepseek("glm4_moe_lite", 47, 2048, 10240, 20, 154880, 768),
            **_sigmoid_experts(64, 4, 1536, 1, 1, 1.8),
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "num_nextn_predict_layers": 1,
            "max_position_embeddings": 202752,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
        },
        (_L(8, tensor=2, expert=8, engine=2, recompute="full"),),
        "temperature 1.0, top_p 0.95",
        "Thinking is on unless chat_template_kwargs has enable_thinking: false. Calls are keys and values in tags.",
    ),
    "moonlight-16b-a3b": ModelPreset(
        "moonshotai/Moonlight-16B-A3B-Instruct",
        {
            **_deepseek("deepseek_v3", 27, 2048, 11264, 16, 163840, None),
            **_sigmoid_experts(64, 6, 1408, 1, 2, 2.446),
            "max_position_embeddings": 8192,
            "rope_theta": 50000.0,
            "rms_norm_eps": 1e-5,
        },
        (_L(4, tensor=4, recompute="full"), _L(8, tensor=2, expert=4)),
        "none is named",
        "No thinking, and no calls. " + OWN_TOKENIZER,
    ),
    "deepseek-v3": ModelPreset(
        "deepseek-ai/DeepSeek-V3",
        {
            **_deepseek("deepseek_v3", 61, 7168, 18432, 128, 129280, 1536),
            **_sigmoid_experts(256, 8, 2048, 3, 1, 2.5, groups=8, of_groups=4),
            "num_nextn_predict_layers": 1,
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "rope_scaling": _yarn(40, 32),
            "rms_norm_eps": 1e-6,
        },
        (
            _L(128, tensor=2, pipeline=4, expert=32, engine=16, recompute="full", options=_first(13)),
            _L(256, tensor=2, pipeline=8, expert=32, engine=32, recompute="full", options=_first(5)),
        ),
        DEEPSEEK_SAMPLING,
        DEEPSEEK_NOTES,
    ),
    "kimi-k2": ModelPreset(
        "moonshotai/Kimi-K2-Instruct",
        _kimi(32.0, 1e-6, 131072),
        (_L(256, tensor=2, pipeline=2, expert=64, engine=32, recompute="full", options=_first(30)),),
        "temperature 0.6",
        KIMI_NOTES,
        {"max_position_embeddings": (262144,), "rope_scaling": (_yarn(64.0, 1.0),)},
    ),
    "kimi-k2-thinking": ModelPreset(
        "moonshotai/Kimi-K2-Thinking",
        _kimi(64.0, 1e-5, 262144),
        (_L(256, tensor=2, pipeline=2, expert=64, engine=32, recompute="full", options=_first(30)),),
        "temperature 1.0",
        KIMI_NOTES,
    ),
    "gpt-oss-20b": ModelPreset(
        "openai/gpt-oss-20b",
        _gpt_oss(24, 32),
        (_L(4, expert=4, recompute="selective"), _L(8, expert=4, recompute="full")),
        GPT_OSS_SAMPLING,
        GPT_OSS_NOTES,
    ),
    "gpt-oss-120b": ModelPreset(
        "openai/gpt-oss-120b",
        _gpt_oss(36, 128),
        (
            _L(16, tensor=4, pipeline=2, expert=8, engine=4, recompute="full"),
            _L(32, tensor=2, expert=32, engine=8, recompute="full"),
        ),
        GPT_OSS_SAMPLING,
        GPT_OSS_NOTES,
    ),
    "glm4.5-106b-a12b": ModelPreset(
        "zai-org/GLM-4.5-Air",
        _glm4_moe(46, 1, 4096, 10944, 128, 1408, 1.0, qk_norm=False),
        (
            _L(16, tensor=4, expert=16, engine=4, recompute="full"),
            _L(32, tensor=2, pipeline=2, expert=16, engine=8, recompute="full"),
        ),
        "temperature 0.6",
        GLM45_NOTES,
    ),
    "glm4.5-355b-a32b": ModelPreset(
        "zai-org/GLM-4.5",
        _glm4_moe(92, 3, 5120, 12288, 160, 1536, 2.5, qk_norm=True),
        (_L(64, tensor=4, pipeline=4, expert=16, engine=8, recompute="full"),),
        "temperature 0.6",
        GLM45_NOTES,
        {"max_position_embeddings": (202752,)},
    ),
}
