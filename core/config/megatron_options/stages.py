"""How many layers each pipeline stage holds, as options of trainer.megatron divide them."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def layers_of_stages(config: RunConfig, layers: int) -> list[int]:
    """Layers of each stage. Their sum is `layers` if the division comes out even."""
    options, stages = config.trainer.megatron, config.trainer.parallel.pipeline
    ends = {0: options.get(FIRST), stages - 1: options.get(LAST)}
    fixed = {stage: count for stage, count in ends.items() if isinstance(count, int)}
    if fixed:
        share = (layers - sum(fixed.values())) // max(1, stages - len(fixed))
        return [fixed.get(stage, share) for stage in range(stages)]
    embedding, loss = int(bool(options.get(EMBEDDING))), int(bool(options.get(LOSS)))
    counts = [(layers + embedding + loss) // stages] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def problems(config: RunConfig, layers: int, whose: str) -> Iterator[Problem]:
    """Problems of a division of a model's layers over stages: layers left out, or a stage without layers."""
    options, stages = config.trainer.megatron, config.trainer.parallel.pipeline
    named = [name for name in (FIRST, LAST, EMBEDDING, LOSS) if options.get(name)]
    if not named:
        if layers % stages:
            yield Problem(
                "trainer.parallel.pipeline",
                stages,
                f"does not divide the {whose}'s {layers} layers",
                f"use a divisor of {layers}, or set trainer.megatron.{FIRST}",
            )
        return
    where, value = f"trainer.megatron.{named[0]}", options[named[0]]
    if {FIRST, LAST} & set(named) and {EMBEDDING, LOSS} & set(named):
        yield Problem(where, value, f"it excludes {' and '.join(named[1:])}", "set one of them")
        return
    counts = layers_of_stages(config, layers)
    if sum(counts) != layers or min(counts) < 1:
        yield Problem(
            where,
            value,
            f"stages of {', '.join(map(str, counts))} layers are not the {whose}'s {layers}",
            f"have {stages} stages with {layers} layers in all",
        )
