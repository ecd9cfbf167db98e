"""What a run writes: sizes and names."""

from __future__ import annotations

from millrace.core.config.plan.memory import MemoryPart, saved_bytes
from millrace.core.config.plan.numbers import Numbers
from millrace.core.config.run_config import RunConfig
from millrace.core.families.architecture import Architecture

BYTES_PER_TOKEN = 16  # stored bytes of rollouts, batch and rewards together, compressed
BYTES_PER_LOGPROB = 4


def disk(config: RunConfig, shape: Architecture, numbers: Numbers) -> list[MemoryPart]:
    """Files of the run by part, at most."""
    tokens = numbers.samples * (numbers.prompt_tokens + numbers.response_tokens)
    stored = numbers.samples * numbers.response_tokens if config.trainer.store_logprobs else 0
    return [
        *weights_on_disk(config, shape, numbers),
        MemoryPart(
            f"samples of {numbers.iterations} iterations (at most)",
            numbers.iterations * (tokens * BYTES_PER_TOKEN + stored * BYTES_PER_LOGPROB),
        ),
    ]


def weights_on_disk(config: RunConfig, shape: Architecture, numbers: Numbers) -> list[MemoryPart]:
    """Checkpoints and exports, which every run writes. A checkpoint is deleted when a later one is complete."""
    if config.pipeline.rollouts_only:
        return []
    width = 2 if config.dtype == "bfloat16" else 4
    checkpoint = sum(saved_bytes(config, shape))
    kept = len(numbers.checkpoints_kept) + (
        1 if len(numbers.checkpoints) > len(numbers.checkpoints_kept) else 0
    )
    exports = len(numbers.exports)
    return [
        MemoryPart("1 checkpoint" if kept == 1 else f"{kept} checkpoints at most at once", kept * checkpoint),
        MemoryPart("1 export" if exports == 1 else f"{exports} exports", exports * shape.parameters * width),
    ]


def files(config: RunConfig, root: str) -> list[str]:
    """Names of the files that the run writes."""
    parts = "prompts, batch, verdicts" + ("" if config.algorithm.supervised else ", rollouts/, rewards/")
    parts += ", logprobs/" if config.trainer.store_logprobs else ""
    last = config.run.iterations
    patterns = [
        f"{root}/run.json",
        f"{root}/iterations/000000 .. {last - 1:06d}/ (iterations 1 to {last}: {parts}, manifest.json)",
    ]
    if not config.pipeline.rollouts_only:
        patterns.append(f"{root}/checkpoints/NNNNNN/")
    if not config.pipeline.rollouts_only and (
        config.checkpoint.export_last or config.checkpoint.export_every
    ):
        patterns.append(f"{root}/exports/NNNNNN/")
    if config.evaluation.sets:
        patterns.append(f"{root}/eval/SET/NNNNNN.parquet")
    return patterns
