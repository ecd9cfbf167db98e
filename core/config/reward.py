"""The `reward` section."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from millrace.core.config.parts.restart import ANY_START
from millrace.core.config.parts.user_function import IMPORT_PATH, UserFunction


class Reward(UserFunction):
    """How samples are scored: a function with its options, and the processes that call it."""

    function: str = Field(
        "millrace.core.rewards.text:exact_match",
        pattern=IMPORT_PATH,
        description="Import path of the reward (millrace.Reward): package.module:function.",
    )
    workers: Annotated[int, ANY_START] = Field(
        1, ge=1, description="Processes that score samples; each can be killed on its own."
    )
    timeout_s: Annotated[float, ANY_START] = Field(
        30, gt=0, description="Longest time for one sample. Seconds."
    )
    max_failed_share: Annotated[float, ANY_START] = Field(
        0.1, ge=0, le=1, description="Share of samples that may fail scoring before the run stops."
    )
