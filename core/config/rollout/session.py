"""Rollouts of several turns, with functions, environments and tools of yours."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from millrace.core.config.parts.restart import ANY_START
from millrace.core.config.parts.section import Section
from millrace.core.config.parts.user_function import UserFunction


class Tool(UserFunction):
    """A function that the policy may call, described to it by its type hints and docstring."""

    name: str = Field(
        "", pattern=r"^[A-Za-z0-9_-]*$", description="What the model calls it; empty: the function's name."
    )


class Session(Section):
    """How one rollout goes on: by a function, in an environment, or by calls of tools alone."""

    function: UserFunction | None = Field(None, description="Makes a rollout (millrace.RolloutFunction).")
    environment: UserFunction | None = Field(
        None, description="Makes an environment for each rollout (millrace.Environment)."
    )
    tools: list[Tool] = Field([], description="Functions that the policy may call.")
    max_turns: int = Field(16, ge=1, description="Turns of one branch.")
    max_tokens: int = Field(
        2048,
        ge=1,
        description="Longest dialogue after the prompt: turns and what was observed between them. Tokens.",
    )
    history: Literal["exact", "append"] = Field(
        "exact",
        description="exact: refuse a chat template that rewrites earlier turns. append: keep what was generated even there.",
    )
    workers: Annotated[int, ANY_START] = Field(
        1,
        ge=1,
        description="Processes that run rollouts, many side by side in each; each can be killed on its own.",
    )
    timeout_s: Annotated[float, ANY_START] = Field(
        60,
        gt=0,
        description="Longest time for a tool, a step of an environment, or the function between two turns. Seconds.",
    )
    rollout_timeout_s: Annotated[float, ANY_START] = Field(
        3600, gt=0, description="Longest time for one rollout. Seconds."
    )
    memory_mb: Annotated[int, ANY_START] = Field(
        4096, ge=64, description="Memory that one process of rollouts may have. MiB."
    )
    max_rollouts: Annotated[int, ANY_START] = Field(
        512, ge=1, description="Rollouts that are under way at once."
    )
    max_calls: Annotated[int, ANY_START] = Field(
        256, ge=1, description="Calls of tools and steps of environments that are under way at once."
    )
