"""The life of a sample: drawn, generated, scored, judged, and a row of the batch. Evaluation has its own rows.

Each class is one row of a stored table. Its fields, in order, are the table's columns, and `schema` makes the Arrow
schema from them: nothing else describes a column. A field that may be None is a nullable column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_type_hints

# Arrow types are named, not made: a process of rollouts needs these classes, and neither Arrow nor numpy
Int32 = Annotated[int, "int32"]
Float32 = Annotated[float, "float32"]
Figures = Annotated[list[tuple[str, float]], "map<string, float64>"]
Texts = Annotated[list[tuple[str, str]], "map<string, string>"]
# a list a row: Python's, or an array of the stored type, which Arrow takes without conversion
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int8s = list[int] | NDArray[np.int8]
    Int32s = list[int] | NDArray[np.int32]
    Float32s = list[float] | NDArray[np.float32]
    Bytes = bytes
else:
    Int8s = Annotated[list, "list<int8>"]
    Int32s = Annotated[list, "list<int32>"]
    Float32s = Annotated[list, "list<float32>"]
    Bytes = Annotated[bytes, "large_binary"]
JsonText = str  # values of any shape (messages, labels, metadata) are stored as JSON text

Status = Literal["completed", "truncated", "aborted", "failed"]
Scoring = Literal["scored", "failed", "timed_out", "skipped"]  # skipped: generation failed
Verdict = Literal["kept", "dropped", "deferred", "returned"]


class PolicySpan(TypedDict):
    """From which response token on a weight version generated."""

    first_token: Int32
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGroup:
    """A prompt that an iteration drew: a row of prompts.parquet."""

    group_id: str
    prompt_id: str
    iteration: Int32
    source: str
    row: int
    epoch: Int32
    ordinal: Int32  # order of drawing within the iteration; from rollout.prompts on: the reserve
    prompt: JsonText  # text or messages
    prompt_tokens: list[Int32]
    label: JsonText | None
    metadata: JsonText | None  # an object
    level: Int32 | None = None  # level of difficulty, for a source with levels
    unusable: str | None = None  # why the row cannot be used: it is dropped without being generated
    deferrals: Int32 | None = None  # how many times the group was deferred, in joined.parquet

    def of_sample(self, index: int) -> dict[str, Any]:
        """The columns that a sample of the group has from it."""
        names = ("group_id", "prompt_id", "iteration", "source", "prompt", "label", "metadata")
        return {"index": index, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSample:
    """A sample that was generated, or failed to be: a row of a rollout part."""

    sample_id: str
    group_id: str
    prompt_id: str
    iteration: Int32
    source: str
    index: Int32  # number of the sample within its group
    prompt: JsonText
    label: JsonText | None
    metadata: JsonText | None
    tokens: Int32s  # prompt and response
    response_length: Int32
    response: str  # decoded for reading and scoring; never tokenised again
    loss_mask: Int8s  # per response token: 1 if the policy generated it
    rollout_logprobs: Float32s  # per response token
    policy_versions: list[PolicySpan]
    engine_id: str
    seed: int
    turns: Int32
    status: Status
    reason: str | None  # why it failed
    timings: Figures  # seconds
    samples: Int32 | None = None  # samples of its rollout; None: it is the only one
    role: str | None = None  # name of its branch
    dialogue: JsonText | None = None  # messages, the prompt's among them, of a rollout of several turns
    session_reward: float | None = None  # the reward that the rollout gave itself
    session_parts: Figures | None = None
    session_texts: Texts | None = None
    session_answer: str | None = None
    # per response token, of a rollout that left generated tokens out of the loss
    trained_mask: Int8s | None = None
    # with rollout.routing_replay: experts of its first tokens, [tokens, layers with experts, experts of a token], as uint8, or
    # uint16 for more than 256 experts. Tokens after the one before the last generated token have none
    routed_experts: Bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSample:
    """What scoring made of a sample: a row of a reward part."""

    sample_id: str
    group_id: str
    reward: float | None  # None unless scored
    reward_parts: Figures
    scoring: Scoring
    reason: str | None
    scoring_s: float
    samples: Int32 | None = None  # samples of its rollout; None: it is the only one
    role: str | None = None
    teacher_logprobs: list[Float32] | None = None  # per response token; None without a served teacher
    teacher_s: float | None = None
    # its k likeliest at each response token, one token's after another's
    teacher_top_tokens: list[Int32] | None = None
    teacher_top_logprobs: list[Float32] | None = None
    teacher_hint: str | None = None  # given to it beside the prompt
    reward_texts: Texts | None = None  # parts of the reward that are texts
    answer: str | None = None  # the answer that the reward found, in its normal form; empty: it found none


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSample:
    """What the filter decided on a sample: a row of verdicts.parquet."""

    sample_id: str
    group_id: str
    prompt_id: str
    verdict: Verdict
    reason: str | None
    train_step: int | None  # weight version that the sample's step makes, in the first pass; None unless kept
    group_reward: float | None = None  # mean reward of the group's scored rollouts
    group_reward_std: float | None = None  # standard deviation of these; None without a buffer
    reused_from: Int32 | None = None  # for a reused sample: the iteration that generated it
    reused_ordinal: Int32 | None = None  # the ordinal of its group in that iteration
    dropped_by: str | None = None  # a filter, or what the sample lacks; None unless dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSample(GeneratedSample):
    """A sample that is trained on: a row of batch.parquet."""

    reward: float | None
    reward_parts: Figures
    scoring: Scoring
    verdict: Verdict
    shaped_reward: float | None  # the reward that the advantage is computed from; None without an advantage
    advantage: float | None  # None if the trainer computes it token by token
    train_step: int
    teacher_logprobs: list[Float32] | None = None  # per response token; None without a served teacher
    reused_from: Int32 | None = None  # for a reused sample: the iteration that generated it
    uses: Int32 | None = None  # times that the reused sample has been trained, this time included
    teacher_top_tokens: list[Int32] | None = None  # of a served teacher, as in ScoredSample
    teacher_top_logprobs: list[Float32] | None = None
    reward_texts: Texts | None = None  # and as its reward's texts
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLogprobs:
    """The trainer's log-probabilities of a trained sample: a row of logprobs/, with trainer.store_logprobs."""

    sample_id: str
    train_step: int  # step of its row in batch.parquet
    trainer_logprobs: Float32s  # per response token, in the loss or not; of the weights before the iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSample:
    """A sample of a held-out set: a row of eval/<set>/NNNNNN.parquet."""

    set: str
    prompt_id: str
    index: Int32
    prompt: JsonText
    label: JsonText | None
    response: str
    response_length: Int32
    status: Status
    reward: float | None
    scoring: Scoring
    version: int  # weight version that generated it
    subset: str | None  # subset of its row, from evaluation.sets[].subset_key
    reason: str | None  # why it was not scored
    loss: float | None = None  # for supervised training: mean over its tokens with a loss, nats
    loss_tokens: Int32 | None = None  # number of these tokens
    reward_texts: Texts | None = None  # parts of the reward that are texts
    answer: str | None = None  # the answer that the reward found, in its normal form; empty: it found none


class Scorable(TypedDict):
    """The fields that a reward may read of a sample, in an iteration or a held-out set."""

    prompt: JsonText
    label: JsonText | None
    metadata: JsonText | None
    response: str
    response_length: int
    status: Status
    dialogue: JsonText | None
    session_reward: float | None
    session_parts: Figures | None
    session_texts: Texts | None
    session_answer: str | None


class Unscored(Scorable):
    """The columns of a rollout part that the reward task reads."""

    sample_id: str
    group_id: str
    source: str
    reason: str | None
    samples: int | None
    role: str | None


class AskedAbout(Unscored):
    """The columns that the reward task reads if a served teacher scores each sample."""

    tokens: list[Int32]


def columns(row: type[Any]) -> list[str]:
    """The columns that a row class names, in order."""
    return list(get_type_hints(row))


def split_parts(parts: Mapping[str, float | str]) -> tuple[Figures, Texts]:
    """A reward's parts in their stored form: numbers, and texts."""
    texts = [(name, value) for name, value in parts.items() if isinstance(value, str)]
    return [(name, value) for name, value in parts.items() if not isinstance(value, str)], texts
