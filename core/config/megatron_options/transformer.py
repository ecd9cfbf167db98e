"""Fields of megatron-core's TransformerConfig: `trainer.megatron`, the losses of an expert router among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.core.config.megatron_options.table import Accepted, Need, OptionTable, by_reason

PIPELINE = Need("trainer.parallel.pipeline of 2 or more", lambda c: c.trainer.parallel.pipeline > 1)
FULL = Need("trainer.recompute=full", lambda c: c.trainer.recompute == "full")
SELECTIVE = Need("trainer.recompute=selective", lambda c: c.trainer.recompute == "selective")
BFLOAT16 = Need(
    "model.dtype=bfloat16",
    lambda c: c.model.dtype != "float32",
    # auto is checked later, when the device is known
)
GPU = Need("trainer.device of auto or cuda", lambda c: c.trainer.device != "cpu")
AUX_LOSS = Need(
    "trainer.megatron.moe_aux_loss_coeff above 0",
    lambda c: bool(c.trainer.megatron.get("moe_aux_loss_coeff")),
)

_coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_count = Annotated[int, Field(ge=1, strict=True)]
_modules = Annotated[list[Literal["core_attn", "mlp", "moe"]], Field(min_length=1)]

ACCEPTED = {
    "moe_aux_loss_coeff": Accepted(_coefficient, "weighs the load balancing loss of the routers", experts=True),
    "moe_router_load_balancing_type": Accepted(
        Literal["aux_loss", "seq_aux_loss"],
        "takes that loss over the step's tokens (aux_loss, when not given) or within each sample (seq_aux_loss)",
        need=AUX_LOSS,
        experts=True,
        refused_values={
            "global_aux_loss": "aux_loss is over all tokens of the step already",
            "sinkhorn": "it routes a token by the others of its pack, and engines do not",
            "none": "without moe_aux_loss_coeff there is no such loss",
        },
    ),
    "moe_z_loss_coeff": Accepted(_coefficient, "weighs the z-loss of the routers' logits", experts=True),
    "moe_router_dtype": Accepted(
        Literal["fp32", "fp64"], "is the type that routers compute in: fp32 when not given", experts=True
    ),
    "recompute_method": Accepted(
        Literal["uniform", "block"], "groups the layers that are computed again: uniform when not given", need=FULL
    ),
    "recompute_num_layers": Accepted(
        _count, "is how many layers a group has (uniform) or are computed again a stage (block)", need=FULL
    ),
    "recompute_modules": Accepted(
        _modules, "has these computed again instead of millrace's choice of norms and activations", need=SELECTIVE
    ),
    "num_layers_in_first_pipeline_stage": Accepted(_count, "is the first stage's number of layers", need=PIPELINE),
    "num_layers_in_last_pipeline_stage": Accepted(_count, "is the last stage's number of layers", need=PIPELINE),
    "pipeline_model_parallel_layout": Accepted(
        str, "is every stage's share of the model: `Et*3|t*4|t*4|tL` has four stages, E the embedding, t a layer, L the output layer",
        need=PIPELINE,
    ),
    "account_for_embedding_in_pipeline_split": Accepted(
        bool, "gives the first stage a layer less, for the embedding", need=PIPELINE
    ),
    "account_for_loss_in_pipeline_split": Accepted(
        bool, "gives the last stage a layer less, for the loss", need=PIPELINE
    ),
    "deallocate_pipeline_outputs": Accepted(
        bool, "frees a stage's output once the next stage has it", need=PIPELINE
    ),
    "disable_bf16_reduced_precision_matmul": Accepted(
        bool, "has matrix products of bf16 sum in fp32 throughout", need=BFLOAT16
    ),
    "gradient_accumulation_fusion": Accepted(
        bool, "sums weight gradients in the matrix product itself: true when not given", need=GPU
    ),
}  # fmt: skip

ELSEWHERE = {
    "tensor_model_parallel_size": "trainer.parallel.tensor",
    "pipeline_model_parallel_size": "trainer.parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "trainer.parallel.virtual",
    "context_parallel_size": "trainer.parallel.context",
    "expert_model_parallel_size": "trainer.parallel.expert",
    "expert_tensor_parallel_size": "trainer.parallel.expert_tensor",
    "sequence_parallel": "trainer.parallel.sequence",
    "recompute_granularity": "trainer.recompute",
    "moe_layer_recompute": "trainer.recompute",
    "moe_enable_routing_replay": "rollout.routing_replay",
    "deterministic_mode": "trainer.deterministic",
    "bf16": "model.dtype",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "enable_autocast": "model.dtype",
    "autocast_dtype": "model.dtype",
}

_MODEL = "the model's config.json decides it"
_FAMILY = "no family that is supported has it"
_ENGINE = "it needs Transformer Engine, which is not installed"
_LAYERS = "millrace's layers have their own fused operations, which do not read it"
_ATTENTION = "millrace's attention over packs does not read it"
_REPEAT = "log-probabilities must be repeatable"
_PACKS = "packs have different lengths"
_WEIGHTS = "weights are read from model.path"
_INFERENCE = "engines generate, not the trainer"

REFUSED = by_reason(
    {
        _MODEL: """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels softmax_scale
            softmax_type layernorm_epsilon layernorm_zero_centered_gamma normalization qk_layernorm qk_l2_norm add_bias_linear
            add_qkv_bias gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value rotary_interleaved
            no_rope_freq window_size window_attn_skip_freq apply_residual_connection_post_layernorm attention_output_gate
            num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax
            moe_router_score_function moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
            moe_router_topk_limited_devices moe_apply_probs_on_input moe_mlp_glu_interleave_size
            moe_shared_expert_glu_interleave_size""",
        _FAMILY: """multi_latent_attention mtp_num_layers mtp_loss_scaling_factor mtp_standalone
            experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
            dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
            linear_value_head_dim linear_num_key_heads linear_num_value_heads mrope_section is_hybrid_model mamba_state_dim
            mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path heterogeneous_block_specs
            hetereogenous_dist_checkpoint moe_shared_expert_intermediate_size moe_shared_expert_gate
            moe_shared_expert_overlap moe_latent_size use_fused_weighted_squared_relu use_mup mup_attn_scale_power
            mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult mtp_detach_heads
            mtp_grad_scale_func mtp_hybrid_override_pattern mtp_use_repeated_layer dsa_indexer_k_norm_epsilon
            dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
            dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend
            experimental_attention_variant_loss_scale_func mamba_training_ssm_states_dtype""",
        _ENGINE: """fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
            fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red
            first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 activation_func_fp8_input_store fp4
            fp4_recipe fp4_param fp4_quantizer_factory quant_recipe use_te_rng_tracker use_te_activation_func tp_comm_overlap
            tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
            tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
            tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend cpu_offloading cpu_offloading_num_layers
            cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
            disable_parameter_transpose_cache symmetric_ar_type batch_invariant_mode transformer_impl moe_grouped_gemm
            moe_permute_fusion moe_router_fusion moe_router_padding_for_quantization moe_router_padding_for_fp8
            delay_wgrad_compute qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit
            cpu_offloading_retain_pinned_cpu_buffers fp8_output_proj fused_residual_rmsnorm moe_single_grouped_bias
            moe_single_grouped_weight overlap_dispatch_backward_with_experts_wgrad use_grouped_gemm_for_dense_mlp
            use_grouped_gemm_for_shared_expert use_transformer_engine_op_fuser""",
        "it needs a library that is not installed: kitchen": """use_kitchen use_kitchen_attention
            kitchen_attention_backend""",
        "it needs a library that is not installed: DeepEP": """moe_enable_deepep moe_flex_dispatcher_backend
            moe_deepep_num_sms moe_hybridep_num_sms moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
            moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
            moe_ncclep_static_shape moe_ncclep_zero_copy moe_permute_fusion_into_hybridep""",
        "it needs a PyTorch that is built for it": "use_ring_exchange_p2p",
        _LAYERS: """bias_activation_fusion bias_dropout_fusion persist_layer_norm memory_efficient_layer_norm
            apply_rope_fusion fused_single_qkv_rope fp32_residual_connection fine_grained_activation_offloading
            offload_modules min_offloaded_tensor_size activation_offload_fraction delay_offload_until_cuda_graph
            delta_offload_bytes_across_pp_ranks fine_grained_offloading_max_inflight_offloads mlp_chunks_for_training
            moe_paged_stash moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
            moe_paged_stash_page_size""",
        _ATTENTION: """attention_backend attention_softmax_in_fp32 apply_query_key_layer_scaling masked_softmax_fusion
            cp_comm_type hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel flash_attention_version""",
        _REPEAT: """hidden_dropout attention_dropout moe_input_jitter_eps moe_router_force_load_balancing moe_router_force_biased""",
        "which tokens are dropped would follow from the pack that a sample is in": """moe_expert_capacity_factor
            moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dropping moe_expert_rank_capacity_factor""",
        "an exported model and the engines have no such bias": """moe_router_enable_expert_bias
            moe_router_bias_update_rate moe_router_quantile_balancing_ema""",
        "only the dispatcher alltoall takes packs of different lengths": "moe_token_dispatcher_type",
        "millrace groups the products of experts itself": "moe_use_legacy_grouped_gemm",
        "millrace reports the mean over layers: moe_aux_loss and moe_z_loss": "moe_per_layer_logging",
        _PACKS: """variable_seq_lengths enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope
            cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_modules""",
        _WEIGHTS: """use_cpu_initialization init_method output_layer_init_method init_method_std embedding_init_method
            embedding_init_method_std init_model_with_meta_device""",
        "wrong gradient norms with tensor parallelism": "perform_initialization",
        "wrong losses with virtual pipeline stages on gloo": "batch_p2p_comm batch_p2p_sync",
        "packs come in groups of as many as a pipeline has ranks": "microbatch_group_size_per_vp_stage",
        "shapes of packs are exchanged before each transfer, which waits": """overlap_p2p_comm
            overlap_p2p_comm_warmup_flush""",
        "millrace's layers run whole, and nothing between their parts": """overlap_moe_expert_parallel_comm
            ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream""",
        "checkpoints, export and sync know parameters that are whole over data parallel ranks": """gtp_weight_remat_size
            expert_gtp_weight_remat_size tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards""",
        "process groups are made before the model": "pipeline_model_parallel_comm_backend",
        "it casts gradients to bf16; log-probabilities have their own fused path": """cross_entropy_loss_fusion
            cross_entropy_fusion_impl""",
        "log-probabilities have their own path, which is not deferred": """defer_embedding_wgrad_compute
            wgrad_deferral_limit""",
        "denominators are fixed before the batch is split": "calculate_per_token_loss",
        "a layer is computed again in every pack or in none": "num_microbatches_with_partial_activation_checkpoints",
        "trainer.parallel.sequence splits these activations already": """distribute_saved_activations
            clone_scatter_output_in_embedding""",
        "gradients of fp16 need a loss scale; set model.dtype=bfloat16": "fp16",
        "millrace puts its own function there": """timers finalize_model_grads_func grad_scale_func no_sync_func
            grad_sync_func param_sync_func _cpu_offloading_context moe_grad_scale_func""",
        "megatron-core ignores it": "moe_extended_tp async_tensor_model_parallel_allreduce",
        "nothing but megatron-core's own tests and timers reads it": "test_mode barrier_with_L1_time",
        "run.json holds the configuration": "config_logger_dir",
        _INFERENCE: """flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
            inference_fuse_tp_communication mlp_chunks_for_prefill
            inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
            inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
            moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill""",
    }
)

TRANSFORMER = OptionTable("trainer.megatron", "TransformerConfig", ACCEPTED, ELSEWHERE, REFUSED)


@dataclass(frozen=True)
class MoELosses:
    """Coefficients; 0 turns a loss off."""

    kind: str = "aux_loss"  # moe_router_load_balancing_type
    aux_coeff: float = 0.0
    z_coeff: float = 0.0

    @property
    def wanted(self) -> bool:
        """Whether any loss is on."""
        return self.aux_coeff > 0 or self.z_coeff > 0


FIELDS = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")


def moe_losses(options: Mapping[str, Any]) -> MoELosses:
    """The losses that options of trainer.megatron name."""
    kind, aux, z = (options.get(name) for name in FIELDS)
    return MoELosses(kind or "aux_loss", float(aux or 0), float(z or 0))
