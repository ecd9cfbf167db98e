"""The policy as a megatron-core GPTModel, built from a Hugging Face config.

Owns configuration and construction. The model's last stage gives hidden states: log-probabilities are taken from them
in millrace.connectors.megatron.model.logprobs, so that logits of a whole pack never exist.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from millrace.connectors.megatron.model.attention import PackedAttention
from millrace.connectors.megatron.model.fused import rotary_table
from millrace.connectors.megatron.model.layers import GatedSilu, Norm, PackedLayer, PackedSelfAttention
from millrace.connectors.megatron.optim import weight_gradients
from millrace.connectors.megatron.weights.hf_mapping import Shape
from millrace.core.architecture import expert_count
from millrace.core.config import RunConfig
from millrace.core.config.rules.passthrough import MEGATRON_REFUSED
from millrace.core.errors import ConfigError


class PolicyModel(GPTModel):
    """GPTModel whose last stage answers with hidden states [T, 1, H] instead of logits.

    Layers get cosines and sines of this rank's tokens in place of angles of positions: packs repeat positions, and every
    layer would look them up anew.
    """

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = list(super()._preprocess(input_ids, position_ids, *args, **kwargs))
        found[1] = rotary_table(found[1], position_ids[0])
        return tuple(found)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def model_shape(hf: dict[str, Any]) -> Shape:
    """Heads and vocabulary of a Hugging Face config."""
    heads = hf["num_attention_heads"]
    return Shape(
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        vocab=hf["vocab_size"],
    )


def padded_vocab(vocab: int, tensor_parallel: int) -> int:
    """Vocabulary rounded up so that every tensor parallel rank holds the same number of rows."""
    return -(-vocab // tensor_parallel) * tensor_parallel


def transformer_config(config: RunConfig, hf: dict[str, Any]) -> TransformerConfig:
    """megatron's configuration of the model and its parallelism. Raises ConfigError for refused passthrough fields."""
    parallel, shape = config.trainer.parallel, model_shape(hf)
    experts = expert_count(hf)
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    values: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_te_activation_func": True,  # the layers' own module, which is GatedSilu
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] == "qwen2",
        "qk_layernorm": hf["model_type"] in ("qwen3", "qwen3_moe"),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1 if parallel.expert > 1 else parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": config.trainer.device != "cpu" and weight_gradients.install(),
        "apply_rope_fusion": False,
        "deterministic_mode": False,
    }
    if experts:
        values |= {
            "num_moe_experts": experts,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
            "moe_router_dtype": "fp32",
        }
        if not moe_utils.HAVE_TE:  # 0.16.1 asks for this name also when Transformer Engine is not installed
            vars(moe_utils)["te_general_gemm"] = None
    if config.trainer.recompute == "full":
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif config.trainer.recompute == "selective":
        values |= {"recompute_granularity": "selective", "recompute_modules": []}  # PackedLayer's own
    return TransformerConfig(**{**values, **_passthrough(config)})


def _passthrough(config: RunConfig) -> dict[str, Any]:
    """trainer.megatron, checked against the installed version's fields."""
    known = {field.name for field in fields(TransformerConfig)}
    for name in config.trainer.megatron:
        if name in MEGATRON_REFUSED:
            raise ConfigError(f"trainer.megatron.{name}: not allowed: {MEGATRON_REFUSED[name]}; remove it")
        if name not in known:
            raise ConfigError(
                f"trainer.megatron.{name}: the installed megatron-core has no such TransformerConfig field"
            )
    return dict(config.trainer.megatron)


class CriticModel(PolicyModel):
    """The policy's body with a scalar head, zero at first, in place of the output layer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{**arguments, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The state by shards; megatron's own language model asks for an output layer."""
        found: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return found


def build_model(config: RunConfig, hf: dict[str, Any], kind: type[PolicyModel] = PolicyModel) -> PolicyModel:
    """This rank's stage of a model, with megatron's own initial weights."""
    tc = transformer_config(config, hf)
    spec = get_gpt_layer_local_spec(
        num_experts=tc.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=tc.qk_layernorm,
        normalization="RMSNorm",
    )
    spec.module = PackedLayer
    layer = spec.submodules
    layer.self_attention.module = PackedSelfAttention
    feed_forward = layer.mlp.submodules
    (feed_forward.experts.submodules if tc.num_moe_experts else feed_forward).activation_func = GatedSilu
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    if tc.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    layers = get_num_layers_to_build(tc)
    return kind(
        config=tc,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm),
        vocab_size=padded_vocab(hf["vocab_size"], tc.tensor_model_parallel_size),
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=(hf.get("rope_parameters") or hf).get("rope_theta", 10000),
        parallel_output=True,
    )
