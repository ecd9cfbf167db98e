"""The fields of `algorithm`, its `correction` and `teacher_server`, and how a preset fills the missing ones. Knows nothing of the mathematics."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from millrace.core.config.algorithm.advantage import Advantage, Critic, GroupRelative
from millrace.core.config.algorithm.loss import Clipped, Loss
from millrace.core.config.algorithm.presets import PRESETS, Preset
from millrace.core.config.parts.from_preset import EMPTY_IN_FORMS, FROM_PRESET, given_values, merged
from millrace.core.config.parts.menu import menu_of, spelled_out
from millrace.core.config.parts.restart import ANY_START, in_a_branch
from millrace.core.config.parts.section import READS, Section
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.contracts.references import WHOLE


class TeacherServer(Section):
    """A server that gives the log-probabilities of tokens it is sent. Its tokenizer must be the model's."""

    url: Annotated[str, ANY_START] = Field(
        pattern=r"^https?://",
        description="Address of the server: for SGLang as in http://host:30000, for the other protocols up to /v1.",
    )
    protocol: Annotated[Literal["sglang", "vllm", "openai"], ANY_START] = Field(
        "sglang",
        description="Its protocol: sglang (/generate), vllm (completions with prompt_logprobs) or openai "
        "(completions with echo).",
    )
    model: str | None = Field(None, description="The teacher's name on the server; only for vllm and openai.")
    key: Annotated[str | None, ANY_START] = Field(
        None,
        pattern=WHOLE,
        description="Its Bearer token, as a reference: ${env:NAME} or ${prefect:BLOCK}.",
    )
    top_k: int = Field(
        0,
        ge=0,
        le=256,
        description="Likeliest tokens of each position that it gives, and that the loss compares; 0: log-probabilities of the sampled token alone, in the advantage. Only for sglang and vllm.",
    )
    hint: UserFunction | None = Field(
        None,
        description="Function (millrace.TeacherHint) that gets a finished sample and returns text that is added to the teacher's prompt, not to the policy's. Not with rollout.session.",
    )
    concurrency: Annotated[int, ANY_START] = Field(32, ge=1, description="Samples that it scores at once.")
    timeout_s: Annotated[float, ANY_START] = Field(
        120, gt=0, description="Longest time for one attempt. Seconds."
    )
    attempts: Annotated[int, ANY_START] = Field(
        3, ge=1, description="Attempts for one sample before it counts as failed."
    )
    same_tokenizer: Annotated[bool, ANY_START] = Field(
        False,
        description="Assert that its tokenizer is the model's, if the server's answers cannot prove it.",
    )


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


GROUP_BASELINES = (
    "group_relative",
    "leave_one_out",
    "max_rl",
    "reinforce_plus_plus_baseline",
    "function",
)


class Overlong(Section):
    """DAPO's soft penalty on responses near the generation budget."""

    buffer_tokens: int | None = Field(
        None,
        ge=1,
        description="The penalty grows over this many tokens at the end of the budget; a fifth of it when not given.",
    )
    factor: float = Field(1.0, gt=0, description="Penalty at the budget's end, in units of reward.")


class Algorithm(Section):
    """What is learned from rewards. A preset fills the fields that are not given; without one they are GRPO's."""

    model_config = EMPTY_IN_FORMS

    preset: Preset = Field("grpo", description="Published algorithm whose fields are the defaults.")
    advantage: Annotated[Advantage, FROM_PRESET] = GroupRelative()
    whiten: Annotated[bool, FROM_PRESET] = Field(
        False,
        description="Shift and scale advantages to mean 0, variance 1 over the iteration's batch, not step by step.",
    )
    overlong: Annotated[Overlong | None, FROM_PRESET] = Field(
        None, description="Overlong penalty; null or the word none turns it off."
    )
    shaping: UserFunction | None = Field(
        None, description="Function (millrace.RewardShaping) that changes rewards before advantages."
    )

    loss: Annotated[Loss, FROM_PRESET] = Clipped()
    old_logprobs: Literal["auto", "recompute", "rollout"] = Field(
        "auto",
        description="Denominator of the ratio: the trainer's own log-probabilities before the iteration's first step "
        "(recompute), the engine's (rollout), or auto: the trainer's, without a forward pass when one step an iteration makes both equal.",
    )
    correction: Correction = Correction()

    aggregation: Annotated[Literal["token_mean", "sequence_mean", "constant"], FROM_PRESET] = Field(
        "sequence_mean", description="How token losses become one number."
    )
    constant_length: Annotated[int | None, FROM_PRESET] = Field(
        None,
        ge=1,
        description="Divisor of aggregation=constant; null is rollout.sampling.max_new_tokens. Tokens.",
    )

    kl_coef: Annotated[float, FROM_PRESET] = Field(
        0.0, ge=0, description="Weight of the KL term against the reference model."
    )
    kl_kind: Annotated[Literal["k1", "k2", "k3", "low_var", "abs"], FROM_PRESET] = Field(
        "k3", description="KL estimator."
    )
    kl_placement: Annotated[Literal["loss", "reward"], FROM_PRESET] = Field(
        "loss", description="Whether the KL is added to the token loss, or subtracted from the token reward."
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
    reference: Annotated[str | None, in_a_branch("one run has one algorithm", moves=True), READS] = Field(
        None,
        description="Hugging Face checkpoint folder of the reference model, of the policy's architecture; null: the weights that the "
        "run starts from.",
    )
    reference_update_steps: int | None = Field(
        None, ge=1, description="Steps after which the reference becomes the policy; never when not given."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")

    on_policy_guard: Annotated[bool, ANY_START] = Field(
        True,
        description="Refuse an iteration's first step unless its ratio is exactly 1 and its KL from equal weights below 1e-9.",
    )

    distillation_coef: Annotated[float, FROM_PRESET] = Field(
        0.0,
        ge=0,
        description="Weight of the teacher (on-policy distillation): of its log-probabilities in the advantage, or of the "
        "KL from it in the loss when teacher_server.top_k is above 0.",
    )
    teacher: Annotated[str | None, in_a_branch("one run has one algorithm", moves=True), READS] = Field(
        None,
        description="Hugging Face checkpoint folder of the teacher, which the trainer's ranks hold; same tokenizer as the model.",
    )
    teacher_server: TeacherServer | None = Field(
        None, description="Server that holds the teacher, instead of `teacher`."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = given_values(values, cls)
        preset = given.get("preset", "grpo")
        if not isinstance(preset, str) or preset not in PRESETS:
            return given
        defaults = dict(PRESETS[preset])
        for name, field in cls.model_fields.items():
            menu = menu_of(field)
            if menu and name in defaults and name in given:
                defaults[name], given[name] = menu.complete(defaults[name]), spelled_out(given[name])
        return merged(defaults, given, cls)

    @property
    def supervised(self) -> bool:
        """Whether the loss is the likelihood of reference answers, without engines, rewards and advantages."""
        return self.loss.kind == "sft"

    @property
    def teacher_held(self) -> bool:
        """Whether the trainer's ranks hold the teacher's weights."""
        return self.distillation_coef > 0 and self.teacher is not None and not self.supervised

    @property
    def teacher_top_k(self) -> int:
        """Likeliest tokens of a served teacher, at each position, that the loss compares; 0: only the sampled token."""
        return self.teacher_server.top_k if self.teacher_server is not None else 0

    @property
    def distils_in_advantage(self) -> bool:
        """Whether a teacher's log-probabilities of the sampled tokens are part of the advantage."""
        return self.distillation_coef > 0 and self.teacher_top_k == 0

    @property
    def group_baseline(self) -> bool:
        """Whether the estimator compares the samples of one group, so that a group of one teaches nothing."""
        return not self.supervised and self.advantage.kind in GROUP_BASELINES

    @property
    def advantage_of_samples(self) -> bool:
        """Whether the trainer reads an advantage of each sample from the batch; others it computes token by token."""
        return not self.supervised and self.advantage.kind not in ("gae", "reinforce_plus_plus")

    @property
    def critic(self) -> Critic | None:
        """The critic's settings; None for estimators without one, and in supervised training."""
        return self.advantage.critic if self.advantage.kind == "gae" and not self.supervised else None
