"""Off-policy reuse of finished groups."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.core.config.parts.section import Section
from millrace.core.config.parts.user_function import UserFunction


class Buffer(Section):
    """Trained groups that are trained once more, instead of freshly drawn ones."""

    share: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="Share of rollout.prompts that comes from the buffer, as far as it holds enough.",
    )
    max_age: int = Field(
        4,
        ge=1,
        description="A group is reused while the weights are at most this many versions newer than the weights that generated it.",
    )
    max_uses: int = Field(
        2,
        ge=2,
        description="Times that a group is trained, including the first time.",
    )
    choose: Literal["first_in_first_out", "prioritised", "stratified"] = Field(
        "first_in_first_out",
        description="Which groups are taken first: the oldest; groups whose rewards differ most (largest standard deviation); or one of each stratum in turn, the oldest first.",
    )
    strata: Literal["source", "reward"] = Field(
        "source",
        description="Strata of choose=stratified: data sources, or four equally wide bands of the groups' mean rewards.",
    )
    buffer_filter: UserFunction | None = Field(
        None,
        description="Function (millrace.BufferFilter) that gets the groups held, in the order of `choose`, and returns the groups to take, in their order.",
    )

    def wanted(self, prompts: int) -> int:
        """Groups of an iteration that come from the buffer if it holds enough. prompts: all groups of the iteration."""
        return round(self.share * prompts)
