"""The algorithm section: estimator, loss, correction, aggregation and KL placement, each chosen on its own.

Owns the fields and how a preset fills those that are not given; knows nothing of the mathematics. No torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from millrace.core.config.base import Section
from millrace.core.config.presets import PRESETS, Preset

HOOK = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class Correction(Section):
    """How the gap between the engine's policy (sampler) and the trainer's (old log-probs) is corrected."""

    kind: Literal["none", "truncate", "mask", "icepop", "reject"] = Field(
        "none",
        description="What happens to the importance weight w = pi_old / pi_rollout: truncate bounds it to [low, high] (TIS); "
        "mask zeroes it outside (MIS); icepop is mask on tokens with both bounds required; reject zeroes outside and is 1 inside.",
    )
    level: Literal["token", "sequence_product", "sequence_geometric"] = Field(
        "token",
        description="One weight a token, or one a sequence: the product or the geometric mean of its tokens' weights.",
    )
    low: float = Field(0.0, ge=0, description="Lower bound of the weight.")
    high: float = Field(2.0, gt=0, description="Upper bound of the weight.")
    veto: float | None = Field(
        None, gt=0, lt=1, description="A sequence with any token weight below this is left out of the loss."
    )
    opsm_delta: float | None = Field(
        None,
        gt=0,
        description="Off-policy sequence masking: leave out tokens of negative advantage in sequences whose mean "
        "log-probability fell by more than this since sampling. Nats a token.",
    )


class Overlong(Section):
    """DAPO's soft penalty on responses near the generation budget."""

    buffer_tokens: int | None = Field(
        None,
        ge=1,
        description="The penalty grows over the last so many tokens of the budget; a fifth of it when not given.",
    )
    factor: float = Field(1.0, gt=0, description="Penalty at the budget's end, in units of reward.")


class Critic(Section):
    """PPO's value model; used by advantage=gae alone."""

    lr: float = Field(1e-5, gt=0, description="Peak learning rate of the critic.")
    clip: float | None = Field(0.2, gt=0, description="Clip range of values around the old values.")
    only_steps: int = Field(0, ge=0, description="First steps that train the critic alone.")


class Algorithm(Section):
    """What is learned from rewards. A preset fills the fields that are not given; without one they are GRPO's."""

    preset: Preset = Field("grpo", description="Published algorithm whose fields are the defaults.")
    advantage: Literal[
        "group_relative",
        "leave_one_out",
        "max_rl",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gae",
        "none",
    ] = Field("group_relative", description="Advantage estimator.")
    advantage_function: str | None = Field(
        None,
        pattern=HOOK,
        description="Import path of an estimator (millrace.core.hooks.Advantage) used instead.",
    )
    divide_by_std: bool = Field(
        True, description="Divide group-relative advantages by the group's standard deviation."
    )
    epsilon: float = Field(1e-6, gt=0, description="Added to the standard deviation that divides.")
    whiten: bool = Field(
        False, description="Shift and scale advantages to mean 0, variance 1 over the batch."
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount a token.")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's lambda.")
    overlong: Overlong | None = Field(None, description="Overlong penalty; none when not given.")
    shaping_function: str | None = Field(
        None, pattern=HOOK, description="Import path of a reward shaping (millrace.core.hooks.RewardShaping)."
    )

    loss: Literal["clipped", "gspo", "cispo", "sapo", "reinforce", "sft"] = Field(
        "clipped", description="Policy loss."
    )
    loss_function: str | None = Field(
        None, pattern=HOOK, description="Import path of a token loss (millrace.core.hooks.Loss) used instead."
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="Lower clip range of the ratio.")
    clip_high: float = Field(0.2, gt=0, description="Upper clip range of the ratio.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bound of the ratio for negative advantages (dual-clip PPO)."
    )
    sapo_temperatures: tuple[float, float] = Field(
        (1.0, 1.05), description="SAPO's gate temperatures for positive and negative advantages."
    )
    old_logprobs: Literal["auto", "recompute", "rollout"] = Field(
        "auto",
        description="Denominator of the ratio: the trainer's own before the iteration's first step (recompute), the "
        "engine's (rollout), or auto: the trainer's, without a forward pass where one step an iteration makes it equal.",
    )
    correction: Correction = Correction()

    aggregation: Literal["token_mean", "sequence_mean", "constant", "per_rollout"] = Field(
        "sequence_mean", description="How token losses become one number."
    )
    constant_length: int | None = Field(
        None,
        ge=1,
        description="Divisor of aggregation=constant; rollout.sampling.max_new_tokens when not given. Tokens.",
    )

    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL term against the reference model.")
    kl_kind: Literal["k1", "k2", "k3", "low_var", "abs"] = Field("k3", description="KL estimator.")
    kl_placement: Literal["loss", "reward"] = Field(
        "loss", description="Where the KL goes: added to the token loss, or taken off the token reward."
    )
    kl_unbiased: bool = Field(
        False, description="Weight the KL term in the loss by pi / pi_old, unbiased off-policy."
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="Adaptive coefficient: the KL it steers to; fixed when not given. Nats a token.",
    )
    kl_horizon: int = Field(10000, ge=1, description="Samples over which the adaptive coefficient moves.")
    reference_update_steps: int | None = Field(
        None, ge=1, description="Steps after which the reference becomes the policy; never when not given."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")

    on_policy_guard: bool = Field(
        True,
        description="Refuse an iteration's first step unless its ratio is exactly 1 and its KL from equal weights below 1e-9.",
    )

    critic: Critic = Critic()
    distillation_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the teacher's log-probabilities in the advantage (on-policy distillation).",
    )
    teacher: str | None = Field(
        None, description="Hugging Face checkpoint folder of the teacher; same tokenizer as the model."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "grpo")
        known = isinstance(preset, str) and preset in PRESETS
        return _merged(PRESETS[preset], given) if known else given

    @property
    def group_baseline(self) -> bool:
        """Whether the estimator compares the samples of one group, so that a group of one teaches nothing."""
        return self.loss != "sft" and self.advantage in (
            "group_relative",
            "leave_one_out",
            "max_rl",
            "reinforce_plus_plus_baseline",
        )


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`, section by section."""
    merged = dict(defaults)
    for name, value in given.items():
        below = merged.get(name)
        merged[name] = (
            _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return merged
