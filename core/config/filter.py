"""The `filter` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from millrace.core.config.parts.restart import ANY_START
from millrace.core.config.parts.section import Section
from millrace.core.config.parts.user_function import UserFunction


class Filter(Section):
    """Which groups are trained on."""

    drop_zero_variance: bool = Field(
        False, description="Drop groups whose rewards are all equal and draw others (dynamic sampling)."
    )
    group_filter: UserFunction | None = Field(
        None,
        description="Function (millrace.GroupFilter) that may drop a scored group, besides drop_zero_variance.",
    )
    refill_factor: float = Field(
        2.0,
        ge=0,
        description="Extra prompts an iteration may draw in place of dropped ones, in multiples of rollout.prompts.",
    )
    when_insufficient: Annotated[Literal["keep", "stop"], ANY_START] = Field(
        "keep",
        description="When the extra prompts are used up: keep the earliest zero-variance groups, or stop the run.",
    )
