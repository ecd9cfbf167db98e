"""The algorithm section. No torch, no I/O."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from core.config.base import Section


class Algorithm(Section):
    """Estimator, loss and aggregation, each chosen on its own."""

    advantage: Literal["group_relative"] = Field("group_relative", description="Advantage estimator.")
    divide_by_std: bool = Field(
        True, description="Divide group-relative advantages by the group's standard deviation."
    )
    loss: Literal["clipped", "sft"] = Field("clipped", description="Policy loss.")
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip range of the ratio.")
    clip_high: float = Field(0.2, gt=0, description="Upper clip range of the ratio.")
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="How token losses become one number."
    )
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the KL term against the reference model in the loss."
    )
    kl_kind: Literal["k1", "k2", "k3", "low_var", "abs"] = Field("k3", description="KL estimator.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
