"""What one iteration does, and how many there are."""

from dataclasses import dataclass, field

from millrace.core.config.run_config import RunConfig
from millrace.core.periodic import checkpoints_to_drop, due, exports_after, saves_after


@dataclass(frozen=True)
class Numbers:
    """Numbers of one iteration, and of iterations."""

    iterations: int
    prompts: int
    spare_prompts: int
    drops: bool  # whether a setting drops groups that were scored
    samples_per_prompt: int
    samples: int
    global_batch: int
    passes: int
    steps: int
    weight_versions: int
    sync_every: int
    rollouts_only: bool
    rollouts_from: str | None
    prompt_tokens: int
    response_tokens: int
    pack_tokens: int
    samples_a_pack: int  # samples of the greatest length
    chunk_groups: int | None  # groups whose passes are made together; None: the whole batch
    evaluations: int
    evaluated_samples: str
    checkpoints: list[int] = field(default_factory=list)
    checkpoints_kept: list[int] = field(default_factory=list)
    exports: list[int] = field(default_factory=list)


def numbers_of(config: RunConfig) -> Numbers:
    """The numbers of a configuration that was checked."""
    iterations, c = config.run.iterations, config.checkpoint
    done = range(1, iterations + 1)
    saved = [number for number in done if saves_after(config, number)]
    dropped = checkpoints_to_drop(saved, c.keep_last, c.keep_every)
    exports = [number for number in done if exports_after(config, number)]
    evaluated = [number for number in done if due(number, config.evaluation.every) or number == iterations]
    longest = config.data.max_prompt_tokens + config.rollout.longest_response
    return Numbers(
        iterations=iterations,
        prompts=config.rollout.prompts,
        spare_prompts=round(config.filter.refill_factor * config.rollout.prompts) if config.generates else 0,
        drops=config.filter.drops,
        samples_per_prompt=config.rollout.samples_per_prompt,
        samples=config.samples_per_iteration,
        global_batch=config.global_batch,
        passes=config.trainer.passes,
        steps=config.steps_per_iteration,
        weight_versions=iterations * config.steps_per_iteration,
        sync_every=config.pipeline.sync_every,
        rollouts_only=config.pipeline.rollouts_only,
        rollouts_from=config.pipeline.rollouts_from,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.rollout.longest_response,
        pack_tokens=config.trainer.max_pack_tokens * config.trainer.parallel.context,
        samples_a_pack=config.trainer.max_pack_tokens * config.trainer.parallel.context // longest,
        chunk_groups=config.pipeline.chunk_groups(config.rollout.prompts) if config.pipeline.eager else None,
        evaluations=1 + len(evaluated) if config.evaluation.sets else 0,
        evaluated_samples=", ".join(f"{e.name} × {e.samples_per_prompt}" for e in config.evaluation.sets),
        checkpoints=saved,
        checkpoints_kept=[number for number in saved if number not in dropped],
        exports=exports,
    )
