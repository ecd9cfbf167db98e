"""megatron's parallel groups within the process group of the trainer's ranks."""

import contextlib
import socket
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import random as megatron_random

from millrace.connectors.trainers import process
from millrace.connectors.trainers.megatron.process import cpu_shim
from millrace.connectors.trainers.place import RankPlace
from millrace.core.config import RunConfig


def join(
    config: RunConfig, rank: int, world_size: int, master: tuple[str, int], meeting: socket.socket | None
) -> torch.device:
    """Start this rank's process group and parallel state; returns its device. Call it once per process.

    master: address and port at which the ranks meet. meeting: rank 0's socket, which listens there.
    """
    device = process.join(config, rank, world_size, master, meeting)
    if device.type == "cpu":
        cpu_shim.install()
    p = config.trainer.parallel
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=p.tensor,
        pipeline_model_parallel_size=p.pipeline,
        virtual_pipeline_model_parallel_size=p.virtual if p.virtual > 1 else None,
        context_parallel_size=p.context,
        expert_model_parallel_size=p.expert,
        expert_tensor_parallel_size=p.tensor_of_experts,
    )
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True)
    return device


def rank_place() -> RankPlace:
    """This rank's place, after `join`. Ranks of one tensor or context parallel group have equal values, so one of them reports."""
    context = mpu.get_context_parallel_rank()
    return RankPlace(
        data_rank=mpu.get_data_parallel_rank(),
        data_size=mpu.get_data_parallel_world_size(),
        data_group=mpu.get_data_parallel_group(),
        context_rank=context,
        context_group=mpu.get_context_parallel_group() if mpu.get_context_parallel_world_size() > 1 else None,
        reports=mpu.get_tensor_model_parallel_rank() == 0 and context == 0,
        last_stage=bool(mpu.is_pipeline_last_stage()),
    )


def leave() -> None:
    """Undo `join`, so that the process may join other ranks."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
    process.leave()


def device_context(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context that each thread enters around calls to megatron."""
    return cpu_shim.on_cpu() if device.type == "cpu" else contextlib.nullcontext()


def model_context(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A cheaper context for calls to the model and the loss, which name no device."""
    return cpu_shim.suspended() if device.type == "cpu" else contextlib.nullcontext()
