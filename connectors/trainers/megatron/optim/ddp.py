"""megatron's distributed data parallel wrapper: fp32 gradient buffers and when they are reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from millrace.core.config import RunConfig


def wrap(model: GPTModel, config: RunConfig) -> DistributedDataParallel:
    """Wrap the model with fp32 gradient buffers, which are reduced over data and context parallel ranks.

    A bucket of gradients is reduced as soon as the last pack's backward pass has filled it, while that pass continues.
    """
    inner: Any = Float16Module(model.config, model) if model.config.bf16 else model
    values = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": mpu.get_data_parallel_world_size(with_context_parallel=True) > 1,
        "use_distributed_optimizer": config.trainer.optimizer.distributed,
        "check_for_nan_in_grad": False,
    }
    ddp = DistributedDataParallelConfig(**{**values, **config.trainer.megatron_ddp})
    wrapped = DistributedDataParallel(model.config, ddp, inner)
    model.config.finalize_model_grads_func = _finalize
    model.config.no_sync_func = wrapped.no_sync  # for all packs except the last
    return wrapped


@contextlib.contextmanager
def accumulating(model: DistributedDataParallel) -> Iterator[None]:
    """A context in which backward passes add to this rank's gradients without reducing them; the step's last passes reduce them."""
    config = model.config
    hooks = config.no_sync_func, config.finalize_model_grads_func
    config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
    try:
        with model.no_sync():
            yield
    finally:
        config.no_sync_func, config.finalize_model_grads_func = hooks


def _finalize(models: list[Any], tokens: Any = None, **arguments: Any) -> None:
    """megatron's function without its division by the number of tokens, a pass over memory that our final losses do not need."""
    finalize_model_grads(models, None, **arguments)
