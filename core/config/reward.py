"""The `reward` section, and how sources, held-out sets and rows name their rewards."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from millrace.core.config.parts.restart import ANY_START, in_a_branch
from millrace.core.config.parts.section import NAME
from millrace.core.config.parts.user_function import UserFunction, listed

REWARD_PATH = r"^(?:slime:[A-Za-z_][\w.]*\.[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"
AS_THE_REWARD = in_a_branch("an open iteration may hold samples that it scored")


class RewardFunction(UserFunction):
    """Your reward: a function or a class. A bare string is its import path."""

    function: str = Field(
        pattern=REWARD_PATH,
        description="Import path of the reward (millrace.Reward): package.module:function, or slime:package.module.function.",
    )
    options: dict[str, Any] = Field(
        {}, description="Keyword arguments: for a function at every call, for a class at its creation."
    )
    group: bool = Field(
        False, description="One call scores all samples of a prompt: it gets a list and returns one."
    )


class NamedReward(RewardFunction):
    """A reward that rows choose by its name, in their metadata as `reward`. Rows without it keep their source's reward."""

    name: str = Field(pattern=NAME, description="Name of the reward in the rows' metadata.")


class RewardSection(RewardFunction):
    """How samples are scored: a function with its options, and the processes that call it."""

    function: str = Field(
        "millrace.core.rewards.text:exact_match",
        pattern=REWARD_PATH,
        description="Import path of the reward (millrace.Reward): package.module:function, or slime:package.module.function.",
    )
    named: Annotated[list[NamedReward], BeforeValidator(listed)] = Field(
        [],
        description="Rewards that rows choose by name, in `metadata.reward`. A list, or a mapping of names to functions.",
    )
    workers: Annotated[int, ANY_START] = Field(
        1, ge=1, description="Processes that score samples; each can be killed on its own."
    )
    concurrency: Annotated[int, ANY_START] = Field(
        1,
        ge=1,
        description="Samples, or groups with `group`, that one process scores at once; more than 1 for async rewards that wait.",
    )
    timeout_s: Annotated[float, ANY_START] = Field(
        30, gt=0, description="Longest time for one call, which scores one sample or one group. Seconds."
    )
    memory_mb: Annotated[int | None, ANY_START] = Field(
        None, ge=256, description="Memory that each of these processes may allocate; null: all there is. MiB."
    )
    max_processes: Annotated[int | None, ANY_START] = Field(
        None, ge=0, description="Processes that a call may run at once; null: as many as it starts."
    )
    max_failed_share: Annotated[float, ANY_START] = Field(
        0.1, ge=0, le=1, description="Share of samples that may fail scoring before the run stops."
    )
