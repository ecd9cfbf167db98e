"""Distributed data parallel wrapper, optimizer and learning-rate schedule of megatron-core, from the configuration."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from connectors.megatron.model import PolicyModel
from core.config import RunConfig


def wrap(model: PolicyModel, config: RunConfig) -> DistributedDataParallel:
    """The model with fp32 gradient buffers, reduced over data and context parallel ranks."""
    inner: Any = Float16Module(model.config, model) if model.config.bf16 else model
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=config.trainer.optimizer.distributed,
        check_for_nan_in_grad=False,
    )
    wrapped = DistributedDataParallel(model.config, ddp, inner)
    model.config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def make_optimizer(model: DistributedDataParallel, config: RunConfig) -> Any:
    """AdamW over fp32 main parameters."""
    o = config.trainer.optimizer
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=o.lr,
            min_lr=config.trainer.schedule.min_lr,
            weight_decay=o.weight_decay,
            adam_beta1=o.betas[0],
            adam_beta2=o.betas[1],
            adam_eps=o.eps,
            clip_grad=o.clip_grad,
            bf16=config.model.dtype == "bfloat16",
            params_dtype=torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32,
            use_distributed_optimizer=o.distributed,
        ),
        [model],
        use_gloo_process_groups=False,
    )


def make_schedule(optimizer: Any, config: RunConfig) -> OptimizerParamScheduler:
    """Learning rate by optimizer step: linear warm-up, then the configured decay."""
    o, s = config.trainer.optimizer, config.trainer.schedule
    total = s.decay_steps or config.run.iterations * config.steps_per_iteration
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=o.lr,
        min_lr=s.min_lr,
        lr_warmup_steps=s.warmup_steps,
        lr_decay_steps=max(total, s.warmup_steps + 1),
        lr_decay_style=s.kind,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def data_parallel_place() -> tuple[int, int]:
    """This rank's place among data parallel ranks, context parallelism apart."""
    return mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
