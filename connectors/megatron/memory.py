"""What is told when a rank's GPU memory does not suffice: which fields change that, from what they are.

Owns the words; knows nothing of ranks. Nothing is freed by force: the failed call's tensors go with its frames.
"""

from __future__ import annotations

from core.config import RunConfig


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
        how = ", if the memory went while engines generate" if config.engines_rest else ": lower it"
        ways.append(f"engines.sglang.mem_fraction_static (now {share}{how})")
        if not config.engines_rest:
            ways.append("placement.offload_engines (now false: true)")
    return (
        f"rank {rank} ran out of GPU memory in {what}: {_first(reason)} Change one of: {'; '.join(ways)}. "
        "Then start the run again: it goes on from the newest checkpoint, and what was generated is kept"
    )


def _first(reason: str) -> str:
    """Of PyTorch's account: how much was asked for and what was left."""
    sentences = reason.replace("\n", " ").split(". ")
    return ". ".join(part.strip().rstrip(".") for part in sentences[:3] if part.strip()) + "."
