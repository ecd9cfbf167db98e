"""The `filter` section."""

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
    reward_band: tuple[float, float] | None = Field(
        None,
        description="Lowest and highest mean reward of a group that is kept, both included. Drops prompts that are too easy or "
        "too hard.",
    )
    max_truncated_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Drop groups of which more than this share of the responses was cut at the token limit.",
    )
    max_mean_response_tokens: int | None = Field(
        None, ge=1, description="Drop groups whose responses are longer than this on average. Tokens."
    )
    group_filter: UserFunction | None = Field(
        None,
        description="Function (millrace.GroupFilter) that may drop a scored group, besides the filters above. slime's dynamic "
        "filters too, as slime:package.module.function.",
    )
    max_failed_share: Annotated[float, ANY_START] = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of rollout.prompts that group_filter may fail on before the run stops. Their groups are dropped.",
    )
    refill_factor: float = Field(
        2.0,
        ge=0,
        description="Extra prompts an iteration may draw to replace dropped ones, in multiples of rollout.prompts.",
    )
    oversample: Annotated[float, ANY_START] = Field(
        0.0,
        ge=0,
        le=1,
        description="Extra prompts that generate from the start, before any is dropped, in multiples of rollout.prompts: no drop "
        "then waits for another answer. Surplus prompts are ended and returned, and drawn again later; the same groups are trained.",
    )
    when_insufficient: Annotated[Literal["keep", "stop"], ANY_START] = Field(
        "keep",
        description="When the extra prompts are used up: keep the earliest groups that other filters than group_filter dropped, or stop the run.",
    )

    @property
    def drops(self) -> bool:
        """Whether a setting drops groups that were scored."""
        limits = (
            self.reward_band,
            self.max_truncated_share,
            self.max_mean_response_tokens,
            self.group_filter,
        )
        return self.drop_zero_variance or any(limit is not None for limit in limits)
