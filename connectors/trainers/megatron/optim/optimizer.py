"""AdamW, its learning-rate schedule, and megatron-core's data parallel wrapper with fp32 gradient buffers, from the configuration."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from millrace.connectors.trainers.compute_type import compute_type
from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.connectors.trainers.megatron.optim import fused_adamw
from millrace.core.config import RunConfig
from millrace.core.config.trainer import Schedule


def make_optimizer(models: list[DistributedDataParallel], config: RunConfig, lr: float, s: Schedule) -> Any:
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
            params_dtype=compute_type(config),
            use_distributed_optimizer=o.distributed,
            **config.trainer.megatron_optimizer,
        ),
        models,
        use_gloo_process_groups=False,
    )
    fused_adamw.install(optimizer)
    fused_adamw.install_weight_copy(optimizer)
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


def wrap(model: RankModel, config: RunConfig) -> list[DistributedDataParallel]:
    """Wrap each stage with fp32 gradient buffers, which are reduced over data and context parallel ranks.

    A bucket of gradients is reduced as soon as the last pack's backward pass has filled it, while that pass continues.
    """
    values = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": mpu.get_data_parallel_world_size(with_context_parallel=True) > 1,
        "use_distributed_optimizer": config.trainer.optimizer.distributed,
        "check_for_nan_in_grad": False,
    }
    ddp = DistributedDataParallelConfig(**{**values, **config.trainer.megatron_ddp})
    wrapped = [DistributedDataParallel(model.config, ddp, stage) for stage in called(model)]
    model.config.finalize_model_grads_func = _finalize
    model.config.no_sync_func = partial(_no_sync, wrapped)  # for all packs except the last
    return wrapped


def called(model: RankModel) -> list[Any]:
    """The stages in the form that megatron calls."""
    return [Float16Module(stage.config, stage) if stage.config.bf16 else stage for stage in model.stages]


@contextlib.contextmanager
def _no_sync(models: Sequence[DistributedDataParallel]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(model.no_sync())
        yield


@contextlib.contextmanager
def accumulating(models: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """A context in which backward passes add to this rank's gradients without reducing them; the step's last passes reduce them."""
    config = models[0].config
    hooks = config.no_sync_func, config.finalize_model_grads_func
    config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
    try:
        with _no_sync(models):
            yield
    finally:
        config.no_sync_func, config.finalize_model_grads_func = hooks


def _finalize(models: list[Any], tokens: Any = None, **arguments: Any) -> None:
    """megatron's function without its division by the number of tokens, a pass over memory that our final losses do not need."""
    finalize_model_grads(models, None, **arguments)
