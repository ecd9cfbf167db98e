"""The `reward` section."""

from __future__ import annotations

from pydantic import Field

from millrace.core.config.parts.user_function import IMPORT_PATH, UserFunction


class Reward(UserFunction):
    """How samples are scored: a function with its options, and the processes that call it."""

    function: str = Field(
        "millrace.core.rewards.text:exact_match",
        pattern=IMPORT_PATH,
        description="Import path of the reward (millrace.Reward): package.module:function.",
    )
    workers: int = Field(1, ge=1, description="Processes that score samples; each can be killed on its own.")
    timeout_s: float = Field(30, gt=0, description="Longest time for one sample. Seconds.")
    max_failed_share: float = Field(
        0.1, ge=0, le=1, description="Share of samples that may fail scoring before the run stops."
    )
