"""Fields of megatron-core's OptimizerConfig: `trainer.megatron_optimizer`."""

from millrace.core.config.megatron_options.table import Accepted, OptionTable, by_reason

ACCEPTED = {
    "apply_wd_to_qk_layernorm": Accepted(
        bool, "decays the norms of queries and keys too, unlike other norms and biases"
    ),
    "decoupled_weight_decay": Accepted(
        bool, "decays weights apart from the gradient (AdamW); false adds the decay to it (Adam)"
    ),
}

_SCHEDULE = "one schedule sets the rate of every parameter"

ELSEWHERE = {
    "lr": "trainer.optimizer.lr",
    "min_lr": "trainer.schedule.min_lr",
    "weight_decay": "trainer.optimizer.weight_decay",
    "adam_beta1": "trainer.optimizer.betas",
    "adam_beta2": "trainer.optimizer.betas",
    "adam_eps": "trainer.optimizer.eps",
    "clip_grad": "trainer.optimizer.clip_grad",
    "use_distributed_optimizer": "trainer.optimizer.distributed",
    "optimizer_cpu_offload": "trainer.optimizer.offload",
    "optimizer_offload_fraction": "trainer.optimizer.offload",
    "bf16": "model.dtype",
    "params_dtype": "model.dtype",
}

REFUSED = by_reason(
    {
        "the optimizer is AdamW: its state is what checkpoints, offload and the fused step know": """optimizer sgd_momentum
            muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps
            muon_tp_mode muon_extra_scale_factor muon_nesterov muon_coefficient_type muon_scalar_optimizer
            adaptive_muon_beta2 adaptive_muon_eps adaptive_muon_moment2_method lion_beta1 lion_beta2
            soap_precondition_frequency soap_shampoo_beta soap_use_kl_shampoo use_layer_wise_distributed_optimizer""",
        _SCHEDULE: "decoupled_lr decoupled_min_lr",
        "it needs Transformer Engine, which is not installed": """fp8_recipe reuse_grad_buf_for_mxfp8_param_ag
            use_precision_aware_optimizer store_param_remainders main_grads_dtype main_params_dtype exp_avg_dtype
            exp_avg_sq_dtype""",
        "gradients of fp16 alone need a loss scale; set model.dtype=bfloat16": """fp16 loss_scale initial_loss_scale
            min_loss_scale loss_scale_window hysteresis""",
        "weights are exported between steps and must be whole by then": """overlap_param_gather
            overlap_param_gather_with_optimizer_step""",
        "trainer.optimizer.offload always pins and overlaps": """use_torch_optimizer_for_cpu_offload
            overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params""",
        "a batch trains its step, or the step is refused whole with the reason": "grad_norm_skip_threshold",
        "packs have different lengths": "optimizer_cuda_graph",
        "millrace reports no such number": "log_num_zeros_in_grad",
        "millrace measures times itself": "barrier_with_L1_time timers",
        "run.json holds the configuration": "config_logger_dir",
    }
)

OPTIMIZER = OptionTable("trainer.megatron_optimizer", "OptimizerConfig", ACCEPTED, ELSEWHERE, REFUSED)
