"""What the decoders here have in common: keys, sizes and parts, of which a family's file makes its description."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.core.families.family import REFUSED, Bound, Honoured, ModelPart
from millrace.core.families.quantised.kinds import REMEDY, is_read


def same_as_heads(sizes: Mapping[str, Any]) -> Any:
    """As many key heads as query heads."""
    return sizes["num_attention_heads"]


def hidden_over_heads(sizes: Mapping[str, Any]) -> Any:
    """A head's width if the heads share the hidden size evenly."""
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    return hidden // heads if hidden % heads == 0 else REFUSED


SIZES = {
    "vocab_size": Honoured(int),
    "hidden_size": Honoured(int),
    "intermediate_size": Honoured(int),
    "num_hidden_layers": Honoured(int),
    "num_attention_heads": Honoured(int),
    "max_position_embeddings": Honoured(int),
    "rms_norm_eps": Honoured(float, absent=1e-6),
    "tie_word_embeddings": Honoured(bool, absent=False),
}


def _all_full(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(one == "full_attention" for one in value)


UNQUANTISED = "take the checkpoint that is not quantised, or write one in bfloat16 from it"
_DTYPES = ("float32", "float16", "bfloat16", None)


# keys that have one meaning in every decoder here
BOUND = {
    "quantization_config": Bound((None,), is_read, remedy=REMEDY),
    "compression_config": Bound((None,), remedy=UNQUANTISED),
    "dtype": Bound(_DTYPES, remedy=UNQUANTISED),
    "torch_dtype": Bound(_DTYPES, remedy=UNQUANTISED),
    "hidden_act": Bound(("silu",)),
    "attention_bias": Bound((False,)),
    "mlp_bias": Bound((False,)),
    "attention_dropout": Bound((0, 0.0)),
    "use_sliding_window": Bound((False,)),
    "layer_types": Bound((None,), _all_full),
    "use_mrope": Bound((False,)),
    "rope_interleaved": Bound((False,)),
    "chunk_size_feed_forward": Bound((0,)),
    "pruned_heads": Bound(({}, None)),
    "is_encoder_decoder": Bound((False,)),
    "is_decoder": Bound((False,)),
    "add_cross_attention": Bound((False,)),
    "tie_encoder_decoder": Bound((False,)),
}


def _layer_numbers(value: list[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def bound_but(*keys: str) -> dict[str, Bound]:
    """BOUND without keys that a family reads."""
    return {key: rule for key, rule in BOUND.items() if key not in keys}


def _rotating(sizes: Mapping[str, Any]) -> Any:
    return sizes["qk_rope_head_dim"]


def _latent_head(sizes: Mapping[str, Any]) -> Any:
    return sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]


GATE_SLOPE = 1.702  # of clamped gates
TOGETHER = "experts_together"  # the flag of an Architecture of which a tensor holds all experts of a layer
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")  # keys of which a mixture has one
# of Qwen's mixtures of experts
EXPERT_SIZES = {
    "num_key_value_heads": Honoured(int),
    "head_dim": Honoured(int, absent=hidden_over_heads),
    "num_experts": Honoured(int),
    "num_experts_per_tok": Honoured(int),
    "moe_intermediate_size": Honoured(int),
    "norm_topk_prob": Honoured(bool, absent=False),
    # a dense MLP has its own size
    "decoder_sparse_step": Honoured(int, absent=1),
    "mlp_only_layers": Honoured(list, absent=[], null=[], allows=_layer_numbers),
}
# of routers that take sigmoids
SIGMOID_EXPERTS = {
    "n_routed_experts": Honoured(int),
    "n_shared_experts": Honoured(int),
    "num_experts_per_tok": Honoured(int),
    "moe_intermediate_size": Honoured(int),
    "norm_topk_prob": Honoured(bool),
    "routed_scaling_factor": Honoured(float),
    "n_group": Honoured(int),
    "topk_group": Honoured(int),
}
SIGMOID_BOUND = {
    "scoring_func": Bound(("sigmoid",)),
    "topk_method": Bound(("noaux_tc",)),
    "moe_layer_freq": Bound((1,)),
}
FURTHER_LAYERS = {"num_nextn_predict_layers": Honoured(int, absent=0, null=0, least=0)}
# of latent attention; head_dim says what rotates of a head
LATENT_SIZES = {
    "num_key_value_heads": Honoured(int, absent=same_as_heads, null=same_as_heads),
    "q_lora_rank": Honoured(int, null=None),
    "kv_lora_rank": Honoured(int),
    "qk_nope_head_dim": Honoured(int),
    "qk_rope_head_dim": Honoured(int),
    "qk_head_dim": Honoured(int, absent=_latent_head),
    "head_dim": Honoured(int, absent=_rotating),
    "v_head_dim": Honoured(int),
    "rope_interleave": Honoured(bool, absent=True),
}
# of the norms of latents: Hugging Face's and DeepSeek's classes take no other, whatever rms_norm_eps says
LATENT_EPS = 1e-6
ROUTER_LOSSES = {"output_router_logits", "router_aux_loss_coef"}  # trainer.megatron sets the losses

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
HARMLESS = frozenset((_NOTES + _TRAINING + _OUTPUTS + _TOKENS + _GENERATION).split())
NO_WINDOW = {"sliding_window", "max_window_layers"}  # harmless where use_sliding_window is bound to false

_IN, _AT = "decoder.layers.{layer}", "model.layers.{layer}"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BEFORE = (ModelPart("embedding.word_embeddings.weight", {EMBEDDING: ("vocab", "hidden")}, 0),)
AFTER = (
    ModelPart("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}),
    ModelPart("output_layer.weight", {HEAD: ("vocab", "hidden")}, 0),
)
NORMS = (
    ModelPart(f"{_IN}.input_layernorm.weight", {f"{_AT}.input_layernorm.weight": ("hidden",)}),
    ModelPart(f"{_IN}.pre_mlp_layernorm.weight", {f"{_AT}.post_attention_layernorm.weight": ("hidden",)}),
)
# of what attention and the feed-forward part give, before it is added
BRANCH_NORMS = tuple(
    ModelPart(f"{_IN}.{name}_layernorm.weight", {f"{_AT}.{name}_layernorm.weight": ("hidden",)})
    for name in ("post_self_attn", "post_mlp")
)
_ROWS = (("q", "q"), ("k", "kv"), ("v", "kv"))
ATTENTION = (
    ModelPart(
        f"{_IN}.self_attention.linear_qkv.weight",
        {f"{_AT}.self_attn.{name}_proj.weight": (rows, "hidden") for name, rows in _ROWS},
        0,
        "heads",
    ),
    ModelPart(
        f"{_IN}.self_attention.linear_proj.weight", {f"{_AT}.self_attn.o_proj.weight": ("hidden", "q")}, 1
    ),
)
_GATED_ROWS = (("q", "q_and_gate"), ("k", "kv"), ("v", "kv"))
# a gate for what each head attends to, as wide as the head
GATED_ATTENTION = (
    ModelPart(
        f"{_IN}.self_attention.linear_qkv.weight",
        {f"{_AT}.self_attn.{name}_proj.weight": (rows, "hidden") for name, rows in _GATED_ROWS},
        0,
        "gated_heads",
    ),
    ATTENTION[1],
)
QKV_BIAS = (
    ModelPart(
        f"{_IN}.self_attention.linear_qkv.bias",
        {f"{_AT}.self_attn.{name}_proj.bias": (rows,) for name, rows in _ROWS},
        0,
        "heads",
    ),
)
OUTPUT_BIAS = (
    ModelPart(f"{_IN}.self_attention.linear_proj.bias", {f"{_AT}.self_attn.o_proj.bias": ("hidden",)}),
)
# logits of a key of each head that every token attends to and that has no value
SINKS = (
    ModelPart(
        f"{_IN}.self_attention.core_attention.softmax_offset", {f"{_AT}.self_attn.sinks": ("heads",)}, 0
    ),
)
QK_NORM = tuple(
    ModelPart(
        f"{_IN}.self_attention.{name}_layernorm.weight",
        {f"{_AT}.self_attn.{name}_norm.weight": ("head_dim",)},
    )
    for name in "qk"
)


# megatron's names; the down projections are whole on each rank
LATENT_ATTENTION = tuple(
    ModelPart(f"{_IN}.self_attention.{name}.weight", {f"{_AT}.self_attn.{stored}.weight": shape}, split)
    for name, stored, shape, split in (
        ("linear_q_proj", "q_proj", ("q_direct", "hidden"), 0),
        ("linear_q_down_proj", "q_a_proj", ("q_rank", "hidden"), None),
        ("q_layernorm", "q_a_layernorm", ("q_rank",), None),
        ("linear_q_up_proj", "q_b_proj", ("q", "q_rank"), 0),
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", ("kv_down", "hidden"), None),
        ("kv_layernorm", "kv_a_layernorm", ("kv_rank",), None),
        ("linear_kv_up_proj", "kv_b_proj", ("kv_up", "kv_rank"), 0),
        ("linear_proj", "o_proj", ("hidden", "attended"), 1),
    )
)


_CHANNELS = {"query": "delta_keys", "key": "delta_keys", "value": "delta_values"}
PROJECTED = {**_CHANNELS, "z": "delta_values", "beta": "delta_heads", "alpha": "delta_heads"}
_DELTA_NET = tuple(
    ModelPart(f"{_IN}.self_attention.{name}", {f"{_AT}.linear_attn.{stored}": shape}, split, pieces=pieces)
    for name, stored, shape, split, pieces in (
        ("conv1d.weight", "conv1d.weight", ("delta_channels", "delta_one", "delta_kernel"), 0, _CHANNELS),
        ("A_log", "A_log", ("delta_heads",), 0, {}),
        ("dt_bias", "dt_bias", ("delta_heads",), 0, {}),
        ("out_norm.weight", "norm.weight", ("delta_head",), None, {}),
        ("out_proj.weight", "out_proj.weight", ("hidden", "delta_values"), 1, {}),
    )
)
# megatron's names
DELTA_NET_BY_KEY_HEAD = (
    ModelPart(
        f"{_IN}.self_attention.in_proj.weight",
        {
            f"{_AT}.linear_attn.in_proj_qkvz.weight": ("delta_by_head", "hidden"),
            f"{_AT}.linear_attn.in_proj_ba.weight": ("delta_scalars", "hidden"),
        },
        0,
        "key_heads",
        PROJECTED,
    ),
    *_DELTA_NET,
)
DELTA_NET = (
    ModelPart(
        f"{_IN}.self_attention.in_proj.weight",
        {
            f"{_AT}.linear_attn.in_proj_{name}.weight": (rows, "hidden")
            for name, rows in (
                ("qkv", "delta_channels"),
                ("z", "delta_values"),
                ("b", "delta_heads"),
                ("a", "delta_heads"),
            )
        },
        0,
        "joined",
        PROJECTED,
    ),
    *_DELTA_NET,
)
DELTA_SIZES = {
    "linear_num_key_heads": Honoured(int, absent=16),
    "linear_num_value_heads": Honoured(int, absent=32),
    "linear_key_head_dim": Honoured(int, absent=128),
    "linear_value_head_dim": Honoured(int, absent=128),
    "linear_conv_kernel_dim": Honoured(int, absent=4),
}


def only_with(flag: str, parts: tuple[ModelPart, ...]) -> tuple[ModelPart, ...]:
    """The parts of models whose Architecture has a flag set."""
    return tuple(replace(part, when=flag) for part in parts)


def gated(inside: str, stored: str, width: str) -> tuple[ModelPart, ...]:
    """A gated feed-forward part. inside, stored: where it is in a layer, here and in the checkpoint; width: its size's name."""
    return (
        ModelPart(
            f"{_IN}.{inside}.linear_fc1.weight",
            {f"{_AT}.{stored}.{name}_proj.weight": (width, "hidden") for name in ("gate", "up")},
            0,
            "pair",
        ),
        ModelPart(
            f"{_IN}.{inside}.linear_fc2.weight", {f"{_AT}.{stored}.down_proj.weight": ("hidden", width)}, 1
        ),
    )


DENSE = gated("mlp", "mlp", "ffn")
DENSE_AS_ONE = (
    ModelPart(
        f"{_IN}.mlp.linear_fc1.weight",
        {f"{_AT}.mlp.gate_up_proj.weight": ("gate_up", "hidden")},
        0,
        "halves",
    ),
    DENSE[1],
)
ROUTER = (ModelPart(f"{_IN}.mlp.router.weight", {f"{_AT}.mlp.gate.weight": ("experts", "hidden")}),)
EXPERTS = (
    *ROUTER,
    *gated("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}", "expert_ffn"),
)
_EXPERT = f"{_IN}.mlp.experts.local_experts.{{expert}}"


def experts_together(*, inputs_first: bool = False) -> tuple[ModelPart, ModelPart]:
    """Both products of the experts of a layer, in a tensor each: [experts, out, in], or [experts, in, out] if `inputs_first`."""

    def shape(out: str, into: str) -> tuple[str, ...]:
        return ("experts", into, out) if inputs_first else ("experts", out, into)

    first = {f"{_AT}.mlp.experts.gate_up_proj": shape("expert_pair", "hidden")}
    second = {f"{_AT}.mlp.experts.down_proj": shape("hidden", "expert_ffn")}
    return (
        ModelPart(f"{_EXPERT}.linear_fc1.weight", first, 0, "halves", inputs_first=inputs_first),
        ModelPart(f"{_EXPERT}.linear_fc2.weight", second, 1, inputs_first=inputs_first),
    )


# the same, stored one by one or in tensors of all experts of a layer
EXPERTS_IN_EITHER_FORM = (
    *ROUTER,
    *only_with("experts_apart", EXPERTS[len(ROUTER) :]),
    *only_with(TOGETHER, experts_together()),
)
_PRODUCTS = experts_together(inputs_first=True)
EXPERTS_INPUTS_FIRST = (*ROUTER, *_PRODUCTS)
# a router and experts with biases; tensors of all experts of a layer
BIASED_EXPERTS = (
    ModelPart(f"{_IN}.mlp.router.weight", {f"{_AT}.mlp.router.weight": ("experts", "hidden")}),
    ModelPart(f"{_IN}.mlp.router.bias", {f"{_AT}.mlp.router.bias": ("experts",)}),
    replace(_PRODUCTS[0], form="turns"),
    ModelPart(
        f"{_EXPERT}.linear_fc1.bias",
        {f"{_AT}.mlp.experts.gate_up_proj_bias": ("experts", "expert_pair")},
        0,
        "turns",
    ),
    _PRODUCTS[1],
    ModelPart(f"{_EXPERT}.linear_fc2.bias", {f"{_AT}.mlp.experts.down_proj_bias": ("experts", "hidden")}),
)
# a sigmoid router's; the choice of experts would change if it were rounded
ROUTER_BIAS = (
    ModelPart(
        f"{_IN}.mlp.router.expert_bias",
        {f"{_AT}.mlp.gate.e_score_correction_bias": ("experts",)},
        trained=False,
    ),
)
# experts that sigmoids choose, beside shared ones; layers without experts are dense
SIGMOID_LAYER = (
    *DENSE,
    *EXPERTS,
    *ROUTER_BIAS,
    *gated("mlp.shared_experts", "mlp.shared_experts", "shared_ffn"),
)
SHARED_GATE = (
    ModelPart(
        f"{_IN}.mlp.shared_experts.gate_weight",
        {f"{_AT}.mlp.shared_expert_gate.weight": ("shared_gate", "hidden")},
    ),
)
