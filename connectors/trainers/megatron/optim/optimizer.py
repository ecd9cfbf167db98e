"""AdamW and the learning-rate schedule of megatron-core, from the configuration."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from millrace.connectors.trainers.megatron.optim import fused_adamw
from millrace.core.config import RunConfig
from millrace.core.config.trainer import Schedule


def make_optimizer(model: DistributedDataParallel, config: RunConfig, lr: float, s: Schedule) -> Any:
    """AdamW over fp32 main parameters."""
    o = config.trainer.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=s.min_lr,
            weight_decay=o.weight_decay,
            adam_beta1=o.betas[0],
            adam_beta2=o.betas[1],
            adam_eps=o.eps,
            clip_grad=o.clip_grad,
            bf16=config.dtype == "bfloat16",
            params_dtype=torch.bfloat16 if config.dtype == "bfloat16" else torch.float32,
            use_distributed_optimizer=o.distributed,
            **config.trainer.megatron_optimizer,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    fused_adamw.install(optimizer)
    return optimizer


def make_schedule(optimizer: Any, config: RunConfig, lr: float, s: Schedule) -> OptimizerParamScheduler:
    """Learning rate by optimizer step: linear warm-up, then the configured decay."""
    o = config.trainer.optimizer
    total = s.decay_steps or config.run.iterations * config.steps_per_iteration
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=s.min_lr,
        lr_warmup_steps=s.warmup_steps,
        lr_decay_steps=max(total, s.warmup_steps + 1),
        lr_decay_style=s.kind,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
