"""Rules of `rollout` and of the samplings of `evaluation`."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.rollout import Tool
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """Sampling parameters that would yield nothing, here and in evaluation sets."""
    for place, sampling in config.samplings:
        if "" in sampling.stop:
            yield Problem(
                f"{place}.stop",
                sampling.stop,
                "an empty string ends every response at once",
                "remove it from the list",
            )
        if any(token < 0 for token in sampling.stop_token_ids):
            yield Problem(
                f"{place}.stop_token_ids",
                sampling.stop_token_ids,
                "no token has a negative id",
                "remove it",
            )
        if sampling.top_k == 0:
            yield Problem(
                f"{place}.top_k",
                0,
                "no token would be left to sample",
                "set it to -1 for the whole vocabulary",
            )
    yield from _session(config)
    if config.algorithm.supervised and config.rollout.samples_per_prompt != 1:
        yield Problem(
            "rollout.samples_per_prompt",
            config.rollout.samples_per_prompt,
            "algorithm.loss=sft learns the one reference answer of a prompt",
            "set it to 1",
        )


def _session(config: RunConfig) -> Iterator[Problem]:
    """A session that nothing drives, or two things do; one that is never run; names of tools that clash."""
    session = config.rollout.session
    if session is None:
        return
    if config.algorithm.supervised:
        yield Problem(
            "rollout.session",
            "set",
            "algorithm.loss=sft generates nothing",
            "remove the section",
        )
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
            "nothing says how a rollout goes on",
            "name rollout.session.function, .environment or .tools",
        )
    if session.environment and session.tools:
        yield Problem(
            "rollout.session.tools",
            [tool.function if isinstance(tool, Tool) else "mcp" for tool in session.tools],
            "in an environment nothing calls them",
            "have the environment's steps do what they do, or name rollout.session.function",
        )
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
