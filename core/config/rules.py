"""Fields that clash with each other, each with the remedy. Pure: looks at the configuration and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from core.config.algorithm_rules import problems as algorithm_problems
from core.config.problems import Problem
from core.config.run import RunConfig


def rule_problems(config: RunConfig) -> list[Problem]:
    """Everything wrong across fields, all at once; empty when the configuration makes sense."""
    found = [
        *_batch(config),
        *_parallel(config),
        *_lengths(config),
        *_names(config),
        *_schedule(config),
        *_live(config),
    ]
    steps = max(1, config.steps_per_iteration)
    found += [
        Problem(*problem)
        for problem in algorithm_problems(
            config.algorithm, config.rollout, filter=config.filter, steps_per_iteration=steps
        )
    ]
    return found


def _batch(config: RunConfig) -> Iterator[Problem]:
    samples, batch = config.samples_per_iteration, config.global_batch
    if samples % batch:
        yield Problem(
            "trainer.global_batch",
            batch,
            f"does not divide rollout.prompts × rollout.samples_per_prompt = {config.rollout.prompts} × "
            f"{config.rollout.samples_per_prompt} = {samples}",
            f"take one of {_divisors(samples, batch)}, or leave it out for one step an iteration",
        )
    model_ranks = _model_ranks(config)
    if config.trainer.world_size % model_ranks == 0 and batch < config.data_parallel:
        yield Problem(
            "trainer.global_batch",
            batch,
            f"leaves some of the {config.data_parallel} data parallel ranks without a sample",
            f"set it to {config.data_parallel} or more, or lower trainer.world_size",
        )
    if config.algorithm.loss == "sft" and config.rollout.samples_per_prompt != 1:
        yield Problem(
            "rollout.samples_per_prompt",
            config.rollout.samples_per_prompt,
            "supervised training has one answer a prompt",
            "set it to 1",
        )


def _model_ranks(config: RunConfig) -> int:
    p = config.trainer.parallel
    return p.tensor * p.pipeline * p.context


def _parallel(config: RunConfig) -> Iterator[Problem]:
    p, world = config.trainer.parallel, config.trainer.world_size
    ranks = _model_ranks(config)
    if world % ranks:
        yield Problem(
            "trainer.world_size",
            world,
            f"is no multiple of tensor × pipeline × context = {p.tensor} × {p.pipeline} × {p.context} = {ranks}",
            f"set it to {ranks * max(1, round(world / ranks))}, or change trainer.parallel",
        )
    elif (world // p.pipeline) % p.expert:
        yield Problem(
            "trainer.parallel.expert",
            p.expert,
            f"does not divide the {world // p.pipeline} ranks of a pipeline stage",
            "take a divisor of them",
        )
    if p.sequence and p.tensor == 1:
        yield Problem(
            "trainer.parallel.sequence",
            True,
            "sequence parallelism splits over tensor parallel ranks, and there is one",
            "set it to false, or trainer.parallel.tensor to 2 or more",
        )


def _lengths(config: RunConfig) -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_tokens, config.rollout.sampling.max_new_tokens
    room = config.trainer.max_pack_tokens * config.trainer.parallel.context
    if prompt + response > room:
        yield Problem(
            "trainer.max_pack_tokens",
            config.trainer.max_pack_tokens,
            f"cannot hold the longest sample: data.max_prompt_tokens + rollout.sampling.max_new_tokens = {prompt} + {response}",
            f"set it to {-(-(prompt + response) // config.trainer.parallel.context)} or more, or lower one of those",
        )
    longest = max([response, *(held_out.sampling.max_new_tokens for held_out in config.evaluation.sets)])
    if prompt + longest > config.engines.max_total_tokens:
        yield Problem(
            "engines.max_total_tokens",
            config.engines.max_total_tokens,
            f"cannot hold one sample of {prompt} + {longest} tokens",
            f"set it to {prompt + longest} or more",
        )


def _names(config: RunConfig) -> Iterator[Problem]:
    for field, names in (
        ("data.sources", [source.name for source in config.data.sources]),
        ("evaluation.sets", [held_out.name for held_out in config.evaluation.sets]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            yield Problem(
                field, names, f"{', '.join(twice)} is there more than once", "give each a name of its own"
            )


def _schedule(config: RunConfig) -> Iterator[Problem]:
    s = config.trainer.schedule
    total = config.run.iterations * max(1, config.steps_per_iteration)
    end = s.decay_steps or total
    if s.kind != "constant" and s.warmup_steps >= end:
        yield Problem(
            "trainer.schedule.warmup_steps",
            s.warmup_steps,
            f"leaves nothing of the {end} steps to decay in",
            "lower it, raise decay_steps, or set kind=constant",
        )
    if s.min_lr > config.trainer.optimizer.lr:
        yield Problem(
            "trainer.schedule.min_lr",
            s.min_lr,
            f"is above trainer.optimizer.lr = {config.trainer.optimizer.lr:g}",
            "lower it",
        )


def _live(config: RunConfig) -> Iterator[Problem]:
    kind = config.engines.kind
    if kind == "embedded" and config.engines.gpus > 1:
        yield Problem(
            "engines.gpus",
            config.engines.gpus,
            "the embedded engine uses none",
            "leave it out, or set engines.kind=sglang",
        )
    if kind == "embedded" and config.engines.sglang:
        yield Problem(
            "engines.sglang",
            config.engines.sglang,
            "the embedded engine has no such fields",
            "leave it out, or set engines.kind=sglang",
        )
    if config.placement.colocate and (kind == "embedded" or config.trainer.device == "cpu"):
        yield Problem("placement.colocate", True, "without GPUs there is nothing to share", "set it to false")
    if config.placement.colocate and config.trainer.world_size != config.engines.count * config.engines.gpus:
        yield Problem(
            "trainer.world_size",
            config.trainer.world_size,
            f"shares GPUs with engines.count × engines.gpus = {config.engines.count} × {config.engines.gpus}",
            "make both the number of GPUs, or set placement.colocate=false",
        )
    p = config.trainer.parallel
    if config.sync.transport == "ipc" and (not config.placement.colocate or p.pipeline > 1 or p.expert > 1):
        yield Problem(
            "sync.transport",
            "ipc",
            "hands over GPU memory, which needs placement.colocate and every rank to hold whole layers",
            "set it to disk, or set placement.colocate=true with parallel.pipeline and parallel.expert 1",
        )
    if config.rollout.max_concurrency > config.engines.max_running and kind == "embedded":
        yield Problem(
            "rollout.max_concurrency",
            config.rollout.max_concurrency,
            f"an engine runs engines.max_running = {config.engines.max_running} requests at once; the others would wait in it",
            "lower it, or raise engines.max_running",
        )


def _divisors(number: int, near: int) -> str:
    """Divisors of a number around another, for a remedy."""
    every = [n for n in range(1, number + 1) if number % n == 0]
    return ", ".join(str(n) for n in sorted(sorted(every, key=lambda n: abs(n - near))[:4]))
