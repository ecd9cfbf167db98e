"""`algorithm.loss`: one variant a policy loss. Formulas stand in millrace.core.algorithms.losses."""

from typing import Annotated, Literal

from pydantic import Field

from millrace.core.config.parts.from_preset import EMPTY_IN_FORMS, FROM_PRESET
from millrace.core.config.parts.menu import Menu
from millrace.core.config.parts.section import Section
from millrace.core.config.parts.user_function import UserFunction


class _ClipRange(Section):
    model_config = EMPTY_IN_FORMS

    clip_low: Annotated[float, FROM_PRESET] = Field(
        0.2, gt=0, le=1, description="Lower clip range: the ratio is bounded at 1 - clip_low."
    )
    clip_high: Annotated[float, FROM_PRESET] = Field(
        0.2, gt=0, description="Upper clip range: the ratio is bounded at 1 + clip_high."
    )


class Clipped(_ClipRange):
    """PPO's clipped surrogate, token by token."""

    kind: Literal["clipped"] = "clipped"
    dual_clip: float | None = Field(
        None, gt=1, description="Bound of the ratio for negative advantages (dual-clip PPO)."
    )


class Gspo(_ClipRange):
    """One clipped ratio a sequence: the geometric mean of its tokens' ratios. GSPO, arXiv:2507.18071, whose clip range is the default."""

    kind: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, FROM_PRESET] = Field(
        3e-4, gt=0, le=1, description="Lower clip range: the ratio is bounded at 1 - clip_low."
    )
    clip_high: Annotated[float, FROM_PRESET] = Field(
        4e-4, gt=0, description="Upper clip range: the ratio is bounded at 1 + clip_high."
    )


class Cispo(_ClipRange):
    """The ratio, clipped and detached, weights the log-probability of every token. CISPO, arXiv:2506.13585.

    There is no lower bound, unless it is set; the upper one is that of ScaleRL, arXiv:2510.13786.
    """

    kind: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, FROM_PRESET] = Field(
        1.0, gt=0, le=1, description="Lower clip range: the ratio is bounded at 1 - clip_low."
    )
    clip_high: Annotated[float, FROM_PRESET] = Field(
        4.0, gt=0, description="Upper clip range: the ratio is bounded at 1 + clip_high."
    )


class Sapo(Section):
    """A soft gate on the ratio instead of a clip. SAPO, arXiv:2511.20347."""

    kind: Literal["sapo"] = "sapo"
    temperatures: tuple[float, float] = Field(
        (1.0, 1.05), description="Gate temperatures for positive and negative advantages; above 0."
    )


class Reinforce(Section):
    """Log-probability times advantage, without a ratio: one optimizer step an iteration."""

    kind: Literal["reinforce"] = "reinforce"


class Sft(Section):
    """The likelihood of reference answers: supervised training, without engines, rewards and advantages."""

    kind: Literal["sft"] = "sft"


class LossFunction(UserFunction):
    """Your token loss (millrace.Loss)."""

    kind: Literal["function"] = "function"


Loss = Annotated[
    Clipped | Gspo | Cispo | Sapo | Reinforce | Sft | LossFunction,
    Field(discriminator="kind"),
    Menu(
        """The policy loss.

        - `clipped` — PPO's clipped ratio, token by token.
        - `gspo` — one clipped ratio a sequence. Needs one advantage a sequence.
        - `cispo` — a clipped, detached ratio as weight of the log-probability; no token loses its gradient.
        - `sapo` — a soft gate instead of the clip.
        - `reinforce` — no ratio. Needs one optimizer step an iteration.
        - `sft` — supervised training on the reference answers.
        - `function` — your loss. Needs `function`.
        """,
        default="clipped",
    ),
]
