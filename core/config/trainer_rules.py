"""Rules of `trainer`."""

from collections.abc import Iterator

from millrace.core.config import lora_rules
from millrace.core.config.megatron_options import rules as megatron_options
from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig
from millrace.core.config.trainer import Parallel, Schedule


def problems(config: RunConfig) -> Iterator[Problem]:
    """Steps, layout, packs and learning rates that do not add up, and options of megatron-core that are not passed on."""
    yield from _batch(config)
    if config.algorithm.supervised and config.trainer.passes > 1:
        yield config.problem(
            "trainer.passes",
            "algorithm.loss=sft draws its rows again once all were drawn",
            "set it to 1, and raise run.iterations",
        )
    if config.trainer.by_megatron:
        yield from layout_problems(config)
        if config.trainer.parallel.replicate > 1:
            yield config.problem(
                "trainer.parallel.replicate",
                "megatron-core's trainer has a copy of the weights on each data parallel rank",
                "leave it out, or set trainer.kind=fsdp",
            )
        yield from megatron_options.problems(config)
    else:
        yield from _of_megatron(config)
    if config.trainer.kind == "fsdp":
        yield from _of_fsdp(config)
    yield from lora_rules.problems(config)
    yield from _pack(config)
    yield from _optimizer(config)
    if config.trainer.store_logprobs and config.algorithm.supervised:
        yield config.problem(
            "trainer.store_logprobs",
            "with algorithm.loss=sft no policy sampled the tokens",
            "set it to false, or leave it out",
        )


def _batch(config: RunConfig) -> Iterator[Problem]:
    samples, batch = config.samples_per_iteration, config.global_batch
    if samples % batch:
        near = max((n for n in range(1, min(batch, samples) + 1) if samples % n == 0), default=1)
        yield config.problem(
            "trainer.global_batch",
            f"rollout.prompts × rollout.samples_per_prompt = {samples} samples an iteration are not a whole number of steps",
            f"set it to a divisor of {samples} such as {near}, or leave it out for one step an iteration",
        )


def layout_problems(config: RunConfig) -> Iterator[Problem]:
    """Sizes of the layout that do not divide the ranks, or that need others."""
    world, p = config.trainer.world_size, config.trainer.parallel
    model = p.tensor * p.pipeline * p.context
    if world % model:
        yield config.problem(
            "trainer.world_size",
            f"does not divide by parallel.tensor × pipeline × context = {p.tensor} × {p.pipeline} × {p.context} = {model}",
            f"set it to a multiple of {model}, or lower trainer.parallel",
        )
    elif world % (p.expert * p.tensor_of_experts * p.pipeline):
        cut = ("expert", "expert_tensor", "pipeline") if p.tensor_of_experts > 1 else ("expert", "pipeline")
        yield config.problem(
            "trainer.parallel.expert" if p.expert_tensor is None else "trainer.parallel.expert_tensor",
            f"{' × '.join(cut)} = {p.expert * p.tensor_of_experts * p.pipeline} does not divide trainer.world_size = {world}",
            "lower it, or raise trainer.world_size",
        )
    if p.virtual > 1 and p.pipeline == 1:
        yield config.problem(
            "trainer.parallel.virtual",
            "ranks of a pipeline hold virtual stages, and parallel.pipeline is 1",
            "set it to 1, or parallel.pipeline to 2 or more",
        )
    if p.sequence and p.tensor == 1:
        yield config.problem(
            "trainer.parallel.sequence",
            "sequences are split over tensor parallel ranks, and parallel.tensor is 1",
            "set it to false, or parallel.tensor to 2 or more",
        )


def _of_megatron(config: RunConfig) -> Iterator[Problem]:
    """Settings of megatron-core's trainer, which another does not read."""
    reason, remedy = config.trainer.not_megatron
    parallel, usual = config.trainer.parallel, Parallel()
    own = ("context", "replicate") if config.trainer.kind == "fsdp" else ()
    for name in Parallel.model_fields:
        if name not in own and getattr(parallel, name) != getattr(usual, name):
            yield Problem(f"trainer.parallel.{name}", getattr(parallel, name), reason, remedy)
    if config.trainer.optimizer.offload and not own:
        yield Problem("trainer.optimizer.offload", config.trainer.optimizer.offload, reason, remedy)
    for section in ("megatron", "megatron_optimizer", "megatron_ddp"):
        for name, value in getattr(config.trainer, section).items():
            yield Problem(f"trainer.{section}.{name}", value, reason, remedy)


def _of_fsdp(config: RunConfig) -> Iterator[Problem]:
    """What FSDP's trainer does not do."""
    t = config.trainer
    if t.rank is not None:
        yield config.problem(
            "trainer.rank", "it names your trainer, and trainer.kind another", "remove one of them"
        )
    world, p = t.world_size, t.parallel
    if world % p.context:
        yield config.problem(
            "trainer.parallel.context",
            f"does not divide trainer.world_size = {world}",
            "use a divisor of it, or raise trainer.world_size",
        )
    if world % p.replicate:
        yield config.problem(
            "trainer.parallel.replicate",
            f"does not divide trainer.world_size = {world}",
            "use a divisor of it, or raise trainer.world_size",
        )
    if t.recompute == "selective":
        yield config.problem(
            "trainer.recompute",
            "with trainer.kind=fsdp layers are computed again whole",
            "set it to none or full",
        )
    if not t.optimizer.distributed:
        yield config.problem(
            "trainer.optimizer.distributed",
            "trainer.kind=fsdp always cuts the optimizer's state",
            "set it to true",
        )
    if config.algorithm.critic is not None:
        yield config.problem(
            "algorithm.advantage.kind",
            "trainer.kind=fsdp trains no critic",
            "take an estimator without one, or trainer.kind=megatron",
        )


def _pack(config: RunConfig) -> Iterator[Problem]:
    longest = config.data.max_prompt_tokens + config.rollout.longest_response
    p = config.trainer.parallel
    room = config.trainer.max_pack_tokens * p.context
    align = (2 * p.context if p.context > 1 else 1) * (p.tensor if p.sequence else 1)
    padded = -(-longest // align) * align
    if padded > room:
        yield config.problem(
            "trainer.max_pack_tokens",
            f"a sample may have data.max_prompt_tokens + {config.rollout.longest_response_field} = {longest} tokens, which no pack "
            f"of {room} holds",
            f"set it to {-(-padded // p.context)} or more, or lower one of the two",
        )


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    o, s = config.trainer.optimizer, config.trainer.schedule
    critic = config.algorithm.critic
    for number, beta in enumerate(o.betas):
        if not 0 <= beta < 1:
            yield Problem(
                f"trainer.optimizer.betas.{number}", beta, "a decay rate lies in [0, 1)", "use 0.9 and 0.98"
            )
    if o.offload and not o.distributed:
        yield config.problem(
            "trainer.optimizer.offload",
            "it moves the state of the distributed optimizer, and trainer.optimizer.distributed is false",
            "set it to 0, or trainer.optimizer.distributed=true",
        )
    yield from _schedule(config, "trainer.schedule", s, "the peak, trainer.optimizer.lr", o.lr)
    if critic is not None:
        peak = "the critic's peak, algorithm.advantage.critic.lr"
        if critic.schedule is not None:
            yield from _schedule(
                config, "algorithm.advantage.critic.schedule", critic.schedule, peak, critic.lr
            )
        elif o.lr >= s.min_lr > critic.lr:
            yield from _schedule(config, "trainer.schedule", s, peak, critic.lr)


def _schedule(config: RunConfig, field: str, s: Schedule, of_peak: str, peak: float) -> Iterator[Problem]:
    """A schedule that ends above its peak, or before its warm-up ends."""
    if s.min_lr > peak:
        yield Problem(
            f"{field}.min_lr", s.min_lr, f"it is above {of_peak} = {peak:g}", "lower it, or raise the peak"
        )
    steps = s.decay_steps or config.run.iterations * max(1, config.steps_per_iteration)
    if s.kind != "constant" and s.warmup_steps >= steps:
        yield Problem(
            f"{field}.warmup_steps",
            s.warmup_steps,
            f"the warm-up is not over when the decay ends, after {steps} steps",
            f"set it below {steps}",
        )
