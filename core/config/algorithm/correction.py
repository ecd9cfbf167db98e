"""`algorithm.correction`: what happens to the gap between engine and trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.core.config.parts.section import Section


class Correction(Section):
    """How the gap between the engine's log-probabilities and the trainer's old ones is corrected."""

    kind: Literal["none", "truncate", "mask", "icepop", "reject"] = Field(
        "none",
        description="What happens to the importance weight w = pi_old / pi_rollout: truncate bounds it to [low, high] (TIS); "
        "mask zeroes it outside (MIS); icepop is mask on tokens with both bounds required; reject zeroes outside and is 1 inside.",
    )
    level: Literal["token", "sequence_product", "sequence_geometric"] = Field(
        "token",
        description="One weight per token, or one per sequence: the product or the geometric mean of its tokens' weights.",
    )
    low: float = Field(0.0, ge=0, description="Lower bound of the weight.")
    high: float = Field(2.0, gt=0, description="Upper bound of the weight.")
    veto: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Leave a sequence out of the loss if any of its token weights is below this.",
    )
    opsm_delta: float | None = Field(
        None,
        gt=0,
        description="Off-policy sequence masking: leave out tokens of negative advantage in sequences whose mean "
        "log-probability fell by more than this since sampling. Nats a token.",
    )
    max_token_age: int | None = Field(
        None,
        ge=0,
        description="Leave out tokens that were older than this when their iteration started, in published weight versions: they enter no term of the policy's loss, but its denominators count them.",
    )
