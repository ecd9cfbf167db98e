"""`algorithm.advantage`: one variant an estimator. Formulas stand in millrace.core.algorithms.advantages."""

from typing import Annotated, Literal

from pydantic import Field

from millrace.core.config.parts.from_preset import EMPTY_IN_FORMS, FROM_PRESET
from millrace.core.config.parts.menu import Menu
from millrace.core.config.parts.restart import in_a_branch
from millrace.core.config.parts.section import READS, Section
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.config.trainer import Schedule


class GroupRelative(Section):
    """Rewards minus the mean of their group. GRPO, arXiv:2402.03300."""

    model_config = EMPTY_IN_FORMS

    kind: Literal["group_relative"] = "group_relative"
    divide_by_std: Annotated[bool, FROM_PRESET] = Field(
        True, description="Divide by the group's standard deviation."
    )
    epsilon: float = Field(1e-6, gt=0, description="Added to the standard deviation that divides.")


class LeaveOneOut(Section):
    """Rewards minus the mean of the group's other samples. RLOO, arXiv:2402.14740."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class MaxRl(Section):
    """Rewards minus the mean of their group, divided by that mean: rare successes weigh more. MaxRL, arXiv:2602.02710."""

    kind: Literal["max_rl"] = "max_rl"


class ReinforcePlusPlus(Section):
    """Discounted returns of reward and KL penalty, token by token. REINFORCE++, arXiv:2501.03262."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")


class ReinforcePlusPlusBaseline(Section):
    """Rewards minus the mean of their group, and a KL penalty token by token. REINFORCE++, arXiv:2501.03262."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class Critic(Section):
    """PPO's value model."""

    path: Annotated[str | None, in_a_branch("one run has one algorithm", moves=True), READS] = Field(
        None,
        description="Hugging Face checkpoint folder that the critic's body starts from, of any supported architecture with the model's "
        "tokenizer; null: model.path. It uses the policy's ranks and layout.",
    )
    lr: float = Field(1e-5, gt=0, description="Peak learning rate of the critic.")
    schedule: Schedule | None = Field(
        None,
        description="Learning rate of the critic over optimizer steps; null: trainer.schedule, from its own peak.",
    )
    clip: float | None = Field(0.2, gt=0, description="Clip range of values around the old values.")
    only_steps: int = Field(0, ge=0, description="Optimizer steps at the start that train the critic alone.")


class Gae(Section):
    """Generalised advantage estimation with a critic. PPO, arXiv:1707.06347; GAE, arXiv:1506.02438."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's lambda.")
    critic: Critic = Critic()


class NoAdvantage(Section):
    """No advantage from rewards: for on-policy distillation, whose signal is the teacher."""

    kind: Literal["none"] = "none"


class AdvantageFunction(UserFunction):
    """Your estimator (millrace.Advantage)."""

    kind: Literal["function"] = "function"


Advantage = Annotated[
    GroupRelative
    | LeaveOneOut
    | MaxRl
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Gae
    | NoAdvantage
    | AdvantageFunction,
    Field(discriminator="kind"),
    Menu(
        """How rewards become advantages.

        - `group_relative` — rewards relative to the mean of their group (GRPO). Needs groups of two or more.
        - `leave_one_out` — relative to the mean of the group's other samples (RLOO). Needs groups of two or more.
        - `max_rl` — divided by the group's mean: rare successes weigh more. Needs rewards of 0 or more.
        - `reinforce_plus_plus` — discounted returns, no groups. Use it with `whiten`.
        - `reinforce_plus_plus_baseline` — relative to the mean of their group. Use it with `whiten`.
        - `gae` — a critic's values as baseline (PPO).
        - `none` — no rewards. Needs `distillation_coef` and `teacher` or `teacher_server`.
        - `function` — your estimator. Needs `function`.
        """,
        default="group_relative",
    ),
]
