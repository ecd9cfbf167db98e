"""megatron's TransformerConfig from millrace's configuration and a Hugging Face config."""

import math
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from millrace.connectors.trainers import patches
from millrace.connectors.trainers.compute_type import compute_type
from millrace.connectors.trainers.ops.fused import accumulate
from millrace.core.config import RunConfig
from millrace.core.config.megatron_options.transformer import FIELDS as MOE_LOSS_FIELDS
from millrace.core.families.architecture import architecture


def transformer_config(config: RunConfig, hf: dict[str, Any]) -> TransformerConfig:
    """The model's sizes, its parallelism and the options of trainer.megatron, except the routers' losses."""
    parallel, arch = config.trainer.parallel, architecture(hf)
    dtype = compute_type(config)
    values: dict[str, Any] = {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "ffn_hidden_size": arch.ffn,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        # of latent attention megatron has only the output projection, which takes values' heads
        "kv_channels": arch.value_dim,
        "softmax_scale": arch.score_factor,
        "layernorm_epsilon": arch.eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_te_activation_func": True,  # makes megatron use the layer spec's module, GatedSilu
        "add_bias_linear": arch.biases,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
        "attention_output_gate": arch.output_gate,
        "rotary_interleaved": arch.interleaved,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual if parallel.virtual > 1 else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.tensor_of_experts,
        "sequence_parallel": parallel.sequence,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        "calculate_per_token_loss": True,
        # Weights are not initialised, which would take seconds on one thread: the checkpoint has them all
        "use_cpu_initialization": False,
        "init_method": _unset,
        "output_layer_init_method": _unset,
        "embedding_init_method": _unset,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": config.trainer.device != "cpu"
        and patches.offer_weight_gradient_product(accumulate),
        "apply_rope_fusion": False,
        "deterministic_mode": False,
    }
    if arch.delta:  # layers that differ are stored by their numbers
        values["linear_attention_freq"] = [int(layer in arch.delta_layers) for layer in range(arch.layers)]
    if arch.experts:
        values |= {
            "num_moe_experts": arch.experts,
            "moe_layer_freq": [int(layer in arch.expert_layers) for layer in range(arch.layers)],
            "moe_router_topk": arch.experts_used,
            "moe_ffn_hidden_size": arch.expert_ffn,
            "moe_shared_expert_intermediate_size": arch.shared_ffn or None,
            "moe_shared_expert_gate": arch.shared_gate,
            "moe_router_pre_softmax": not arch.norm_topk,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
            "moe_router_dtype": "fp32",
            "moe_enable_routing_replay": config.rollout.routing_replay,
        }
        patches.name_missing_transformer_engine()
    if config.trainer.recompute == "full":
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif config.trainer.recompute == "selective":
        values |= {"recompute_granularity": "selective", "recompute_modules": []}  # PackedLayer does it
    passed = {name: value for name, value in config.trainer.megatron.items() if name not in MOE_LOSS_FIELDS}
    made = TransformerConfig(**{**values, **passed})
    # for the parts of layers that are not megatron's
    made.arch = arch
    return made


def _unset(weight: Tensor) -> Tensor:
    """Fill with NaN, so that a weight that is never loaded shows."""
    return torch.nn.init.constant_(weight, math.nan)
