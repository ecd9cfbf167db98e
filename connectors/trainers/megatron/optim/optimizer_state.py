"""The optimizer's sharded state, saved under one layout and loaded under any other."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from millrace.connectors.trainers.megatron import patches
from millrace.connectors.trainers.megatron.optim import fused_adamw
from millrace.connectors.trainers.megatron.optim.parameter_state import (
    KEYS,
    bytes_saved,
    sharded_parameter_state,
)
from millrace.connectors.trainers.megatron.optim.step_numbers import parts_of

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def optimizer_state(optimizer: Any, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """The optimizer's sharded state dict, in the form that loads under any layout."""
    parts = parts_of(optimizer)
    for part in parts:
        _fill_state(part.optimizer)
    with patches.parameters_saved_in_place(_distributed(parts), sharded_parameter_state):
        state: dict[str, Any] = optimizer.sharded_state_dict(
            model_state, is_loading=loading, metadata=SHARDING
        )
    for part in parts:
        _unshare_steps(part.optimizer)
    return state


def bytes_of_optimizer(optimizer: Any) -> int:
    """Bytes of main parameters and moments that this rank saves."""
    return sum(
        bytes_saved(part) if isinstance(part, DistributedOptimizer) else _bytes_if_first(part)
        for part in parts_of(optimizer)
    )


def _bytes_if_first(part: Any) -> int:
    """The same if every data parallel rank has the whole state: the first rank saves it. In fp32 the model has the main parameters."""
    if mpu.get_data_parallel_rank(with_context_parallel=True):
        return 0
    keys = len(KEYS) - isinstance(part, FP32Optimizer)
    parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    return sum(keys * torch.float32.itemsize * parameter.numel() for parameter in parameters)


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load moments, main parameters and step counts, and add the parts that megatron omits without Transformer Engine.

    The numbers of the parameter groups (rates, betas, ...) stay the configuration's, not the saving run's from the state dict.
    """
    parts = parts_of(optimizer)
    configured = [_group_numbers(part) for part in parts]
    states = [state] if len(parts) == 1 else [state[number] for number in sorted(state)]
    for part, part_state in zip(parts, states, strict=True):
        if not isinstance(part, DistributedOptimizer):
            adam = part_state.get("optimizer", part_state)["state"]
            adam.setdefault("common_step", torch.zeros((), dtype=torch.float32))  # a step of 0 is not saved
    try:
        with patches.steps_kept_on_load(_distributed(parts)), torch.no_grad():
            optimizer.load_state_dict(state)
    finally:
        for part, numbers in zip(parts, configured, strict=True):
            for group, own in zip(part.optimizer.param_groups, numbers, strict=True):
                group.update(own)
            _unshare_steps(part.optimizer)
        fused_adamw.install(optimizer)


def _group_numbers(part: Any) -> list[dict[str, Any]]:
    """The parameter groups without their parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in part.optimizer.param_groups
    ]


def _distributed(parts: list[Any]) -> list[Any]:
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def _fill_state(adam: torch.optim.Optimizer) -> None:
    """Give Adam the state that its first step would create. A real step would decay weights."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if not state:
                device = parameter.device if group.get("fused") else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)


def _unshare_steps(adam: torch.optim.Optimizer) -> None:
    """Give each parameter a separate step tensor. After loading all share one, and each parameter would increment it."""
    for state in adam.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()
