"""Distributed data parallel wrapper, optimizer and learning-rate schedule of megatron-core, and the optimizer's state."""

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
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from millrace.connectors.megatron.model.policy_model import PolicyModel
from millrace.connectors.megatron.optim import fused_adamw as fast_step
from millrace.core.config import RunConfig


def wrap(model: PolicyModel, config: RunConfig) -> DistributedDataParallel:
    """The model with fp32 gradient buffers, reduced over data and context parallel ranks.

    A bucket of gradients is reduced as soon as the last pack's backward pass has all of it, while that goes on.
    """
    inner: Any = Float16Module(model.config, model) if model.config.bf16 else model
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=mpu.get_data_parallel_world_size(with_context_parallel=True) > 1,
        use_distributed_optimizer=config.trainer.optimizer.distributed,
        check_for_nan_in_grad=False,
    )
    wrapped = DistributedDataParallel(model.config, ddp, inner)
    model.config.finalize_model_grads_func = _finalize
    model.config.no_sync_func = wrapped.no_sync  # for all packs but the last
    return wrapped


def _finalize(models: list[Any], tokens: Any = None, **arguments: Any) -> None:
    """megatron's own, but for its division by the tokens' number: losses here are whole, and that is a pass over memory."""
    finalize_model_grads(models, None, **arguments)


def make_optimizer(model: DistributedDataParallel, config: RunConfig, lr: float) -> Any:
    """AdamW over fp32 main parameters."""
    o = config.trainer.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
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
    fast_step.install(optimizer)
    return optimizer


def make_schedule(optimizer: Any, config: RunConfig, lr: float) -> OptimizerParamScheduler:
    """Learning rate by optimizer step: linear warm-up, then the configured decay."""
    o, s = config.trainer.optimizer, config.trainer.schedule
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


SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def optimizer_state(optimizer: Any, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """The optimizer's sharded state dict, in the form that loads under any layout."""
    for part in _parts(optimizer):
        _fill_state(part.optimizer)
        if isinstance(part, DistributedOptimizer):
            _keep_gaps(part)
    state: dict[str, Any] = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=SHARDING)
    for part in _parts(optimizer):
        vars(part).pop("get_parameter_state_dp_zero", None)
        _own_steps(part.optimizer)
    return state


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Take a loaded state dict. What the distributed optimizer lacks without Transformer Engine is made up for here."""
    parts = _parts(optimizer)
    states = [state] if len(parts) == 1 else [state[number] for number in sorted(state)]
    for part, held in zip(parts, states, strict=True):
        if isinstance(part, DistributedOptimizer):
            _hand_steps_through(part)
        else:
            adam = held.get("optimizer", held)["state"]
            adam.setdefault("common_step", torch.zeros((), dtype=torch.float32))  # a step of 0 is not saved
    try:
        with torch.no_grad():
            optimizer.load_state_dict(state)
    finally:
        for part in _parts(optimizer):
            vars(part).pop("_set_main_param_and_optimizer_states", None)
            _own_steps(part.optimizer)
        fast_step.install(optimizer)


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _fill_state(adam: torch.optim.Optimizer) -> None:
    """Give Adam the state that it makes at its first step, without a step (which would decay weights)."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if not state:
                device = parameter.device if group.get("fused") else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)


def _own_steps(adam: torch.optim.Optimizer) -> None:
    """Loading leaves one step tensor shared by all parameters, which each would then count up."""
    for state in adam.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


def _keep_gaps(part: Any) -> None:
    """megatron leaves the padding between buckets out of what it gathers, and then looks at places that count it.

    There is more than one bucket where embedding and output layer are tied over pipeline stages.
    """
    inherited = part.get_parameter_state_dp_zero

    def gathered(**arguments: Any) -> Any:
        state = inherited(**arguments)
        for number, buffer in enumerate(part.buffers):
            for tensors in (state or {number: {}})[number].values():
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    tensors[key] = _spaced(tensors[key], buffer)
        return state

    part.get_parameter_state_dp_zero = gathered


def _spaced(packed: torch.Tensor, buffer: Any) -> torch.Tensor:
    whole, at = packed.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = packed[at : at + bucket.numel_unpadded]
        at += bucket.numel_unpadded
    return whole


def _hand_steps_through(part: Any) -> None:
    """Setting a parameter's state asks for its step, which the loaded state keeps elsewhere."""
    inherited = part._set_main_param_and_optimizer_states

    def set_states(parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, order = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][order]
        inherited(parameter, {**part.optimizer.state[main], **tensors})

    part._set_main_param_and_optimizer_states = set_states
