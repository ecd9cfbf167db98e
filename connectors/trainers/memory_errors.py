"""Errors for a rank that runs out of GPU or host memory: they name the fields that help, with their current values.

Owns the messages, the texts by which libraries report such a failure, and pinned memory, whose lack has no error of its own. Knows
nothing of ranks. Frees no memory: the failed call's tensors are freed with its frames.
"""

import psutil
import torch
from torch import Tensor

from millrace.core.config import RunConfig
from millrace.core.errors import TrainerMemoryError

OUT_OF_MEMORY_TEXTS = (
    "out of memory",  # PyTorch, CUDA outside PyTorch's allocator, pinned host memory, NCCL's "Cuda failure", Triton
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "device_allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "failed to cuda calloc",  # NCCL
)
STATE_BYTES = 12  # a parameter's fp32 copy and two moments
RESTART = "Then start the run again: it resumes from the newest checkpoint and keeps what was generated"


def ran_out(error: RuntimeError) -> bool:
    """Whether an error means that memory ran out. Decided by the text, since libraries below PyTorch raise plain RuntimeErrors."""
    return any(text in str(error).lower() for text in OUT_OF_MEMORY_TEXTS)


def out_of_memory(call: str, rank: int, config: RunConfig, reason: str) -> TrainerMemoryError:
    """The error for too little GPU memory in a call of a rank. Its remedy lists the fields that take memory."""
    t = config.trainer
    remedies = [f"trainer.max_pack_tokens (now {t.max_pack_tokens}: lower it)"]
    if t.recompute != "full":
        stronger = "selective or full" if t.recompute == "none" and t.by_megatron else "full"
        remedies.append(f"trainer.recompute (now {t.recompute}: {stronger})")
    remedies.append(f"trainer.logprob_chunk_tokens (now {t.logprob_chunk_tokens}: lower it)")
    if t.rank is None and t.optimizer.distributed and t.optimizer.offload < 1:
        remedies.append(f"trainer.optimizer.offload (now {t.optimizer.offload:g}: raise it)")
    split = "trainer.world_size"
    if t.rank is None:
        split = (
            "trainer.parallel.tensor, .pipeline or .context"
            if t.by_megatron
            else f"{split} or .parallel.context"
        )
    remedies.append(f"{split} (more GPUs a model)")
    if config.placement.colocate:
        share = config.engines.sglang.get("mem_fraction_static", "its default")
        how = ", if memory runs out while engines generate" if config.engines_sleep else ": lower it"
        remedies.append(f"engines.sglang.mem_fraction_static (now {share}{how})")
        if not config.engines_sleep:
            remedies.append("placement.offload_engines (now false: true)")
    return TrainerMemoryError(
        f"rank {rank} ran out of GPU memory in {call}: {_summary(reason)}",
        remedy=f"change one of: {'; '.join(remedies)}. {RESTART}",
    )


def out_of_host_memory(size: int, reason: str) -> TrainerMemoryError:
    """The error for a host without room for the optimizer's state."""
    return TrainerMemoryError(
        f"the host has no memory to pin {size / 2**20:.0f} MiB for the optimizer's state: {_summary(reason)}",
        remedy="give the node more memory (12 bytes per parameter trained on it), or set placement.offload_trainer=false (now "
        f"true) if the GPUs have room for trainer and engines at once. {RESTART}",
    )


def pinned(size: int) -> Tensor:
    """Pinned host memory of so many bytes. Raises TrainerMemoryError if the host has none."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise out_of_host_memory(size, str(error)) from None


def check_room_to_offload(elements: int, ranks: int) -> None:
    """Raise TrainerMemoryError if this host lacks memory to step `elements` parameters for each of its ranks."""
    needed, free = ranks * elements * STATE_BYTES, psutil.virtual_memory().available
    if needed > free:
        raise TrainerMemoryError(
            f"the host has {free / 2**30:.1f} GiB of memory free, and {ranks} ranks need {needed / 2**30:.1f} GiB for the "
            "optimizer's state",
            remedy=f"lower trainer.optimizer.offload, or give the node more memory. {RESTART}",
        )


def check_host_memory(size: int, config: RunConfig) -> None:
    """Raise TrainerMemoryError if this host lacks memory for its ranks' copies, `size` bytes each.

    Each rank keeps a copy of the checkpoint that is being written. If the trainer leaves its GPUs to engines, it needs about as
    much again.
    """
    ranks = min(config.trainer.world_size, max(1, torch.cuda.device_count()))
    needed, free = ranks * size * (2 if config.trainer_offloads else 1), psutil.virtual_memory().available
    if needed > free:
        raise TrainerMemoryError(
            f"the host has {free / 2**30:.1f} GiB of memory free, and {ranks} ranks need {needed / 2**30:.1f} GiB to go on "
            "while their checkpoints are written",
            remedy="set checkpoint.background=false, and iterations wait until their checkpoints are written; or give the node "
            f"more memory. {RESTART}",
        )


def _summary(reason: str) -> str:
    """The first sentences of PyTorch's message, with the requested and the free memory."""
    sentences = reason.replace("\n", " ").split(". ")
    return ". ".join(part.strip().rstrip(".") for part in sentences[:3] if part.strip())
