"""Fields of megatron-core's DistributedDataParallelConfig: `trainer.megatron_ddp`."""

from typing import Annotated

from pydantic import Field

from millrace.core.config.megatron_options.table import Accepted, Need, OptionTable, by_reason

SEVERAL = Need(
    "data or context parallel ranks",
    lambda c: c.data_parallel * c.trainer.parallel.context > 1,
)
OVERLAP = Need(
    "data or context parallel ranks, and overlap_grad_reduce not false",
    lambda c: SEVERAL.met(c) and c.trainer.megatron_ddp.get("overlap_grad_reduce", True),
)
DISTRIBUTED = Need("trainer.optimizer.distributed=true", lambda c: c.trainer.optimizer.distributed)

ACCEPTED = {
    "overlap_grad_reduce": Accepted(
        bool, "sums a bucket of gradients over ranks while the backward pass continues: true when not given",
        need=SEVERAL,
    ),
    "bucket_size": Accepted(
        Annotated[int, Field(ge=1, strict=True)], "is the number of parameters from which a bucket is full",
        need=OVERLAP,
    ),
    "pad_buckets_for_high_nccl_busbw": Accepted(
        bool, "pads buckets to a multiple of 2^16 elements per rank", need=DISTRIBUTED
    ),
}  # fmt: skip

ELSEWHERE = {
    "num_buckets": "trainer.megatron_ddp.bucket_size",
    "use_distributed_optimizer": "trainer.optimizer.distributed",
}

REFUSED = by_reason(
    {
        "gradients of packs and ranks are summed in fp32": """grad_reduce_in_fp32
            reduce_scatter_with_fp32_accumulation param_name_patterns_for_fp32_local_accumulation""",
        "denominators are fixed before the batch is split: gradients are summed, not averaged": """average_in_collective
            gradient_reduce_div_fusion""",
        "weights are exported between steps and must be whole by then": "overlap_param_gather align_param_gather",
        "process groups are made without it": "num_distributed_optimizer_instances",
        "a step with a gradient that is not finite is refused whole": "check_for_nan_in_grad check_for_large_grads",
        "it needs Transformer Engine, which is not installed": """fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag
            keep_fp8_transpose_cache delay_wgrad_compute fp4_param_gather""",
        "checkpoints, export and offload know DistributedDataParallel, not FSDP": """use_megatron_fsdp use_custom_fsdp
            data_parallel_sharding_strategy outer_dp_sharding_strategy suggested_communication_unit_size
            preserve_fp32_weights fsdp_double_buffer fsdp_manual_registration fsdp_all_gather_in_start_param_sync
            fsdp_db_use_persist_buf_on_alloc_fail megatron_fsdp_cuda_graph_mode
            megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype
            megatron_fsdp_main_params_dtype megatron_fsdp_max_pool_double_buffer megatron_fsdp_use_decoupled_grad""",
        "placement.offload_trainer could not free buffers that NCCL holds": """nccl_ub disable_symmetric_registration""",
    }
)

DDP = OptionTable("trainer.megatron_ddp", "DistributedDataParallelConfig", ACCEPTED, ELSEWHERE, REFUSED)
