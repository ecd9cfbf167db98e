"""Rules of `rollout.routing_replay`: what returns no experts, or others than those that sampled the tokens."""

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig
from millrace.core.families.architecture import Architecture

# engines.sglang's options with which SGLang's rows, which it keeps by the place of a token's keys and values, are of other tokens
SGLANG_MOVES = {
    "speculative_algorithm": "SGLang does not return the experts of drafted tokens",
    "enable_hierarchical_cache": "keys and values come back from the host without the experts of their tokens",
    "enable_lmcache": "keys and values come from another cache without the experts of their tokens",
    "enable_two_batch_overlap": "two batches at once write the experts of their tokens to the same place",
}


def problems(config: RunConfig) -> Iterator[Problem]:
    """Settings that routing replay contradicts."""
    if not config.rollout.routing_replay:
        return
    field, off = "rollout.routing_replay", "set it to false"
    if config.algorithm.supervised:
        yield config.problem(field, "algorithm.loss=sft learns answers that no engine made", off)
    if not config.trainer.by_megatron:
        which = "trainer.rank" if config.trainer.rank else "trainer.kind"
        yield config.problem(field, f"{which} names another trainer than megatron-core's", off)
    if config.rollout.flush_tokens is not None:
        yield config.problem(
            "rollout.flush_tokens",
            "with rollout.routing_replay an answer is stored with its experts, which engines return when it ends",
            "set it to null, or routing_replay to false",
        )
    if config.engines.router is not None:
        yield config.problem(
            field,
            "sglang-router drops the field that asks for experts",
            f"{off}, or leave engines.router out",
        )
    if config.engines.prefill:
        yield config.problem(
            "engines.prefill",
            "with rollout.routing_replay the engine that decodes would have to know the experts of the prompt, which another chose",
            "set it to 0, or routing_replay to false",
        )
    if config.pipeline.ahead and config.pipeline.on_update == "retract":
        yield config.problem(
            "pipeline.on_update",
            "with rollout.routing_replay tokens would get the experts of a later pass, under other weights",
            "set it to resend",
        )
    for name, reason in SGLANG_MOVES.items():
        value = config.engines.sglang.get(name)
        if value:
            yield Problem(
                f"engines.sglang.{name}", value, f"rollout.routing_replay: {reason}", "leave it out"
            )


def model_problems(config: RunConfig, architecture: Architecture) -> Iterator[Problem]:
    """Routing replay for a model that has nothing to replay."""
    if config.rollout.routing_replay and not architecture.experts:
        yield config.problem("rollout.routing_replay", "the model has no experts", "set it to false")
