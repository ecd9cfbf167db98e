"""The process group of the trainer's ranks, on gloo or NCCL; and what the last bits of a step depend on."""

import os
import platform
import socket
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from millrace.connectors.trainers import patches
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError

VERSIONED = {
    "megatron": ("torch", "megatron-core", "millrace"),
    "fsdp": ("torch", "transformers", "millrace"),
}
JOIN_TIMEOUT = timedelta(minutes=30)
LATER = 2.0  # collectives time out this much later than the driver ends ranks without progress
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def join(
    config: RunConfig, rank: int, world_size: int, master: tuple[str, int], meeting: socket.socket | None
) -> torch.device:
    """Start this rank's process group; returns its device. Call it once per process.

    master: address and port at which the ranks meet. meeting: rank 0's socket, which listens there.
    """
    cuda = config.trainer.device == "cuda" or (config.trainer.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ConfigError(
            "this host has no GPU", where="trainer.device = cuda", remedy="set trainer.device=cpu or auto"
        )
    if cuda:
        device = torch.device("cuda", 0)  # the rank sees only its GPU
        torch.cuda.set_device(device)
        # All ranks of a group need the same value, and SGLang's processes, which join a group for weights, set 0.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    else:
        device = torch.device("cpu")
    torch.set_num_threads(cpu_threads(config.trainer.threads, world_size, gpu=cuda))
    assert (meeting is not None) == (rank == 0), "rank 0 listens, and no other"
    timeout = max(JOIN_TIMEOUT, LATER * timedelta(seconds=config.run.progress_timeout_s))
    store = dist.TCPStore(
        *master,
        world_size,
        is_master=meeting is not None,
        timeout=timeout,
        master_listen_fd=meeting.detach() if meeting else None,
    )
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    torch.manual_seed(config.run.seed)
    if config.trainer.deterministic:
        _use_deterministic_kernels(device)
    return device


def _use_deterministic_kernels(device: torch.device) -> None:
    """Make PyTorch use deterministic kernels, and warn if an operation has none.

    cuBLAS reads a variable for this at its first product, but PyTorch parses the variable at every later product too, which
    takes longer than launching the product. So it is set only for the first product, unless the user set it.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    patches.leave_new_memory_unfilled()
    if device.type == "cuda" and CUBLAS_WORKSPACE not in os.environ:
        os.environ[CUBLAS_WORKSPACE] = ":4096:8"
        one = torch.ones(1, 1, device=device)
        torch.mm(one, one)
        del os.environ[CUBLAS_WORKSPACE]


def cpu_threads(configured: int | None, world_size: int, *, gpu: bool) -> int:
    """Threads for a rank's work on the CPU: as configured, or its share of the cores.

    One thread beside a GPU: its CPU work is small, and spinning worker threads take cores from the threads that launch kernels.
    With several threads, making packs took 35 ms instead of 1 on a busy host.
    """
    return configured or (1 if gpu else max(1, (os.cpu_count() or 1) // world_size))


def leave() -> None:
    """Undo `join`, so that the process may join other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def numerics(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """What the last bits of a step depend on besides its input: host, device, layout, sizes of pieces and versions."""
    t = config.trainer
    return {
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "host": platform.node(),
        "threads": torch.get_num_threads(),
        "world_size": t.world_size,
        "parallel": t.parallel.model_dump(),
        "max_pack_tokens": t.max_pack_tokens,
        "logprob_chunk_tokens": t.logprob_chunk_tokens,
        "recompute": t.recompute,
        "deterministic": t.deterministic,
        "dtype": config.dtype,
        "versions": {name: _version(name) for name in VERSIONED[t.kind]},
    }


def _version(package: str) -> str | None:
    """Installed version; None if a checkout runs without being installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
