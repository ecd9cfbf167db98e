"""What is told when a rank's memory does not suffice: which fields change that, from what they are.

Owns the words, and by which words libraries tell of it; knows nothing of ranks. Nothing is freed by force: the failed
call's tensors go with its frames.
"""

from __future__ import annotations

from millrace.core.config import RunConfig

TOLD = (
    "out of memory",  # PyTorch, CUDA outside PyTorch's allocator, pinned host memory, NCCL's "Cuda failure", Triton
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "device_allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "failed to cuda calloc",  # NCCL
)


def ran_out(error: RuntimeError) -> bool:
    """Whether an error says that memory ran out. Libraries under PyTorch raise plain RuntimeErrors, told by their text."""
    return any(words in str(error).lower() for words in TOLD)


def out_of_memory(what: str, rank: int, config: RunConfig, reason: str) -> str:
    """The message of a TrainerMemoryError: the fields that take memory, each with its value and the way to go."""
    t = config.trainer
    ways = [f"trainer.max_pack_tokens (now {t.max_pack_tokens}: lower it)"]
    if t.recompute != "full":
        stronger = "selective or full" if t.recompute == "none" else "full"
        ways.append(f"trainer.recompute (now {t.recompute}: {stronger})")
    ways.append(f"trainer.logprob_chunk_tokens (now {t.logprob_chunk_tokens}: lower it)")
    ways.append("trainer.parallel.tensor, .pipeline or .context (more GPUs a model)")
    if config.placement.colocate:
        share = config.engines.sglang.get("mem_fraction_static", "its default")
        how = ", if the memory went while engines generate" if config.engines_sleep else ": lower it"
        ways.append(f"engines.sglang.mem_fraction_static (now {share}{how})")
        if not config.engines_sleep:
            ways.append("placement.offload_engines (now false: true)")
    return (
        f"rank {rank} ran out of GPU memory in {what}: {_first(reason)} Change one of: {'; '.join(ways)}. "
        "Then start the run again: it goes on from the newest checkpoint, and what was generated is kept"
    )


def out_of_host_memory(size: int, reason: str) -> str:
    """The message of a TrainerMemoryError where the optimizer's state finds no room on the host."""
    return (
        f"the memory of the host ran out: no room to pin {size / 2**20:.0f} MiB for the optimizer's state: {_first(reason)} "
        "Give the node more memory (12 bytes a parameter that trains on it), or set placement.offload_trainer=false (now "
        "true) where the GPUs have room for trainer and engines at once. Then start the run again: it goes on from the "
        "newest checkpoint, and what was generated is kept"
    )


def _first(reason: str) -> str:
    """Of PyTorch's account: how much was asked for and what was left."""
    sentences = reason.replace("\n", " ").split(". ")
    return ". ".join(part.strip().rstrip(".") for part in sentences[:3] if part.strip()) + "."
