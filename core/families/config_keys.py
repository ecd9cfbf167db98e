"""What every key of a config.json means to the models that are built here: one table a family.

A key is honoured (the model is built from it), bound to the values that mean the model that is built, or harmless (no
value of it changes a log-probability). The tables have every key that the family's class in transformers declares. No other key
changes that class's log-probabilities: it is named in the plan and passes, unless code reads it undeclared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

# without this key the model is unclear: upstream's default differs between families
REFUSED: Final = object()


@dataclass(frozen=True)
class Honoured:
    """A key that the model is built from.

    `kind`: int (at least 1), float (above 0) or bool. `absent` and `null`: the value if the key is missing or null, or a
    function of the sizes read before it; REFUSED if a file must have the key.
    """

    kind: type
    absent: Any = REFUSED
    null: Any = REFUSED


@dataclass(frozen=True)
class Bound:
    """A key whose allowed values, listed or accepted by `allows`, mean the model that is built."""

    values: tuple[Any, ...] = ()
    allows: Callable[[Any, str], bool] | None = None  # gets the value and the family
    remedy: str = "take another model"


def _heads(sizes: Mapping[str, Any]) -> Any:
    return sizes["num_attention_heads"]


def _head_dim(sizes: Mapping[str, Any]) -> Any:
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    return hidden // heads if hidden % heads == 0 else REFUSED


_SIZES = {
    "vocab_size": Honoured(int),
    "hidden_size": Honoured(int),
    "intermediate_size": Honoured(int),
    "num_hidden_layers": Honoured(int),
    "num_attention_heads": Honoured(int),
    "max_position_embeddings": Honoured(int),
    "rms_norm_eps": Honoured(float, absent=1e-6),
    "tie_word_embeddings": Honoured(bool, absent=False),
}
HONOURED: dict[str, dict[str, Honoured]] = {
    "llama": {
        **_SIZES,
        "num_key_value_heads": Honoured(int, absent=_heads, null=_heads),
        "head_dim": Honoured(int, absent=_head_dim, null=_head_dim),
    },
    "qwen2": {
        **_SIZES,
        "num_key_value_heads": Honoured(int, null=_heads),
        "head_dim": Honoured(int, absent=_head_dim),
    },
    "qwen3": {**_SIZES, "num_key_value_heads": Honoured(int, null=_heads), "head_dim": Honoured(int)},
    "qwen3_moe": {
        **_SIZES,
        "num_key_value_heads": Honoured(int),
        "head_dim": Honoured(int, absent=_head_dim),
        "num_experts": Honoured(int),
        "num_experts_per_tok": Honoured(int),
        "moe_intermediate_size": Honoured(int),
        "norm_topk_prob": Honoured(bool, absent=False),
    },
}
# transformers 5 writes the first
ALIASES = {"num_local_experts": "num_experts"}
ROTARY = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")  # rotary.py reads them

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def _all_full(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(one == "full_attention" for one in value)


_UNQUANTISED = "take the checkpoint that is not quantised, or write one in bfloat16 from it"
_DTYPES = ("float32", "float16", "bfloat16", None)
_COMMON_BOUND = {
    "architectures": Bound((None,), lambda value, family: value == [_ARCHITECTURES[family]]),
    "quantization_config": Bound((None,), remedy=_UNQUANTISED),
    "compression_config": Bound((None,), remedy=_UNQUANTISED),
    "dtype": Bound(_DTYPES, remedy=_UNQUANTISED),
    "torch_dtype": Bound(_DTYPES, remedy=_UNQUANTISED),
    "hidden_act": Bound(("silu",)),
    "attention_bias": Bound((False,)),
    "mlp_bias": Bound((False,)),
    "attention_dropout": Bound((0, 0.0)),
    "use_sliding_window": Bound((False,)),
    "layer_types": Bound((None,), lambda value, _: _all_full(value)),
    "use_mrope": Bound((False,)),
    "rope_interleaved": Bound((False,)),
    "chunk_size_feed_forward": Bound((0,)),
    "pruned_heads": Bound(({}, None)),
    "is_encoder_decoder": Bound((False,)),
    "is_decoder": Bound((False,)),
    "add_cross_attention": Bound((False,)),
    "tie_encoder_decoder": Bound((False,)),
}
BOUND: dict[str, dict[str, Bound]] = {
    "llama": _COMMON_BOUND,
    "qwen2": _COMMON_BOUND,
    "qwen3": _COMMON_BOUND,
    "qwen3_moe": {
        **_COMMON_BOUND,
        "mlp_only_layers": Bound(([], None)),
        "decoder_sparse_step": Bound((1,)),
    },
}

_NOTES = """
    model_type transformers_version _name_or_path name_or_path _commit_hash auto_map tokenizer_class prefix
    unsloth_fixed unsloth_version transformers.js_config is_llama_config
    _attn_implementation _attn_implementation_autoset attn_implementation
    _experts_implementation experts_implementation
"""
_TRAINING = "initializer_range"
_OUTPUTS = """
    use_cache return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss
    id2label label2id num_labels problem_type finetuning_task task_specific_params cross_attention_hidden_size
"""
_TOKENS = """
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
"""
_GENERATION = """
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p epsilon_cutoff eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
_COMMON_HARMLESS = frozenset((_NOTES + _TRAINING + _OUTPUTS + _TOKENS + _GENERATION).split())
_NO_WINDOW = {"sliding_window", "max_window_layers"}  # use_sliding_window is bound to false
HARMLESS: dict[str, frozenset[str]] = {
    "llama": _COMMON_HARMLESS | {"pretraining_tp"},
    "qwen2": _COMMON_HARMLESS | _NO_WINDOW,
    "qwen3": _COMMON_HARMLESS | _NO_WINDOW,
    "qwen3_moe": _COMMON_HARMLESS | _NO_WINDOW | {"output_router_logits", "router_aux_loss_coef"},
}
READ_UNDECLARED = (
    frozenset(  # by transformers' attention, masks, caches and rotary embeddings, or by an engine's model
        [
            "sliding_window",
            "attention_chunk_size",
            "layer_types",
            "mlp_layer_types",
            "per_layer_config",
            "num_kv_shared_layers",
            "is_causal",
            "original_max_position_embeddings",
            "rope_is_neox_style",
            "dual_chunk_attention_config",
            "bias",
            "use_qk_norm",
            "qk_norm",
            "attn_temperature_tuning",
            "logits_mup_width_multiplier",
            "unpadded_vocab_size",
        ]
    )
)
FAMILIES = tuple(HONOURED)
