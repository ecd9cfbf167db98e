"""Rules of `pipeline.eager`: settings that need the whole batch before the first backward pass, or more than one step."""

from collections.abc import Iterator

from millrace.core.config.algorithm import Algorithm
from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig

OF_GROUPS = ("group_relative", "leave_one_out", "max_rl", "reinforce_plus_plus_baseline")
"""Estimators whose advantages are known once a group is scored."""
ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


def problems(config: RunConfig) -> Iterator[Problem]:
    """Settings that pipeline.eager cannot be combined with."""
    p, prompts = config.pipeline, config.rollout.prompts
    if not p.eager:
        if p.eager_groups is not None:
            yield config.problem(
                "pipeline.eager_groups",
                "without pipeline.eager no passes are made early",
                "leave it out, or set pipeline.eager=true",
            )
        return
    for why, remedy in (*_mode(config), *_algorithm(config.algorithm), *_trainer(config)):
        yield config.problem("pipeline.eager", why, f"{remedy}, or set it to false")
    if p.chunk_groups(prompts) >= prompts:
        yield config.problem(
            "pipeline.eager_groups",
            f"with rollout.prompts = {prompts} groups the batch would be one chunk, and nothing could start early",
            f"set it to {prompts - 1} or less" if prompts > 1 else "raise rollout.prompts",
        )


def _mode(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Modes in which trainer and engines do not work at once, or the trained groups are known at the end only."""
    p = config.pipeline
    if config.placement.colocate:
        yield (
            "on shared GPUs (placement.colocate) the engines sleep while the trainer works",
            "set placement.colocate=false",
        )
    if p.ahead:
        yield "with pipeline.ahead the trainer is at work on the iteration before", "set pipeline.ahead=0"
    if p.select == "finish":
        yield (
            "with pipeline.select=finish the groups of the batch are known at its end",
            "set pipeline.select=draw",
        )
    if config.rollout.buffer is not None:
        yield (
            "rollout.buffer lays groups of earlier iterations between those that are generated",
            "set rollout.buffer=null",
        )


def _algorithm(a: Algorithm) -> Iterator[tuple[str, str]]:
    if a.supervised:
        yield "supervised training (algorithm.loss=sft) generates nothing", "leave pipeline out"
        return
    if a.advantage.kind not in OF_GROUPS:
        yield (
            f"algorithm.advantage={a.advantage.kind} is not known once a group is scored",
            f"take one of {', '.join(OF_GROUPS)}",
        )
    if a.whiten:
        yield "algorithm.whiten needs the advantages of the whole batch", "set algorithm.whiten=false"
    if a.shaping is not None:
        yield "algorithm.shaping gets the rewards of the whole batch", "set algorithm.shaping=null"
    if a.loss.kind == "function":
        yield (
            "a function in algorithm.loss sees weights that are divided by the whole batch's denominator",
            "take a built-in loss",
        )
    if a.distillation_coef > 0:
        yield (
            "the loss of algorithm.teacher or algorithm.teacher_server is not made early",
            "set algorithm.distillation_coef=0",
        )
    if a.kl_coef > 0 and a.kl_placement == "reward":
        yield "a KL in the reward is part of the advantage", "set algorithm.kl_placement=loss"


def _trainer(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.trainer.passes > 1:
        yield "the batch is trained in several passes (trainer.passes)", "set trainer.passes=1"
    if config.steps_per_pass > 1:
        yield (
            f"an iteration makes {config.steps_per_pass} optimizer steps (trainer.global_batch), and the later ones begin with other weights",
            "set trainer.global_batch=null",
        )
    for name in ROUTER_LOSSES:
        if config.trainer.megatron.get(name):
            yield (
                f"trainer.megatron.{name} weighs a loss over all tokens of the step",
                f"leave trainer.megatron.{name} out",
            )
