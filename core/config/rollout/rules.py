"""Rules of `rollout`; rules of its sampling are in `sampling`."""

from collections.abc import Iterator

from millrace.core.config.algorithm.rules import unweighed
from millrace.core.config.data.rules import same_names
from millrace.core.config.parts.problems import Problem
from millrace.core.config.rollout import Tool, routing_rules
from millrace.core.config.rollout import sampling_rules as sampling
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """Rollouts that would yield nothing, of one turn and of several, and reuse."""
    yield from sampling.problems(config)
    yield from _session(config)
    yield from _buffer(config)
    yield from _flush(config)
    yield from routing_rules.problems(config)
    if config.algorithm.supervised and config.rollout.samples_per_prompt != 1:
        yield config.problem(
            "rollout.samples_per_prompt",
            "algorithm.loss=sft learns the one reference answer of a prompt",
            "set it to 1",
        )


def _flush(config: RunConfig) -> Iterator[Problem]:
    """Storing answers in segments, if turns or a router make that impossible."""
    if config.rollout.flush_tokens is None:
        return
    if config.rollout.session is not None:
        yield config.problem(
            "rollout.flush_tokens",
            "with rollout.session each turn is stored when it ends",
            "set it to null",
        )
    if config.engines.router is not None:
        yield config.problem(
            "rollout.flush_tokens",
            "sglang-router drops sampling_params.stream_interval",
            "set it to null, or leave engines.router out",
        )


def _buffer(config: RunConfig) -> Iterator[Problem]:
    """A buffer that gives no group or all, or whose groups would be trained as if the current policy had sampled them."""
    buffer, prompts, a = config.rollout.buffer, config.rollout.prompts, config.algorithm
    if buffer is None:
        return
    if a.supervised:
        yield config.problem(
            "rollout.buffer", "algorithm.loss=sft trains no rollouts", "set rollout.buffer=null"
        )
        return
    if not 0 < buffer.wanted(prompts) < prompts:
        yield config.problem(
            "rollout.buffer.share",
            f"of rollout.prompts = {prompts} groups that is {buffer.wanted(prompts)}, and both the buffer and fresh prompts "
            "must give one at least",
            f"set it between {1 / prompts:.2g} and {1 - 1 / prompts:.2g}"
            if prompts > 1
            else "raise rollout.prompts",
        )
    steps = max(1, config.steps_per_iteration)
    if buffer.max_age < steps:
        yield config.problem(
            "rollout.buffer.max_age",
            f"an iteration makes {steps} weight versions, so that every group is too old at the next one",
            f"set it to {steps} or more",
        )
    yield from unweighed(config, "rollout.buffer brings samples of older weights")


def _session(config: RunConfig) -> Iterator[Problem]:
    """A session with no driver, or with two; a session that never runs; tools with the same name."""
    session = config.rollout.session
    if session is None:
        return
    if config.algorithm.supervised:
        yield config.problem("rollout.session", "algorithm.loss=sft generates nothing", "remove the section")
    if session.function and session.environment:
        yield Problem(
            "rollout.session.environment",
            session.environment.function,
            "a rollout is made by rollout.session.function or in an environment, not by both",
            "leave one of the two out; a function may make an environment itself",
        )
    if not (session.function or session.environment or session.tools):
        yield Problem(
            "rollout.session",
            "empty",
            "no field says how a rollout continues",
            "name rollout.session.function, .environment or .tools",
        )
    if session.environment and session.tools:
        yield Problem(
            "rollout.session.tools",
            [tool.function if isinstance(tool, Tool) else "mcp" for tool in session.tools],
            "in an environment nothing calls them",
            "let the environment's steps do their work, or name rollout.session.function",
        )
    yield from same_names("rollout.session.named", session.named)
    names = [
        tool.name or tool.function.rpartition(":")[2] for tool in session.tools if isinstance(tool, Tool)
    ]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(
            "rollout.session.tools",
            name,
            "two tools have this name",
            "give one of them another `name`",
        )
