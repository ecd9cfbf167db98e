"""What each task returns and keeps as JSON in results/<task>.json: names of files and figures, never samples.

A committed record means that its task never runs again. Plain dictionaries at run time, as they come back from JSON.
cut.json, too, is committed before the requests of its deferred groups are ended: what timing decided is stored before it has an
effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict

from millrace.core.logprob_gap import LogprobGuard


class FileRecord(TypedDict):
    """A file that a task wrote."""

    path: str
    sha256: str
    size: int
    rows: int | None  # rows of a table
    table: str | None  # kind of the table


class ReusedGroup(TypedDict):
    """A group of an earlier iteration that this one trains again."""

    iteration: int
    ordinal: int
    age: int  # weight versions
    uses: int  # times that it was trained, this time included


class CurriculumRecord(TypedDict):
    """Progress of a run whose prompts follow a curriculum."""

    levels: NotRequired[dict[str, int]]  # highest level drawn from, by source with levels
    stage: NotRequired[int]  # of data.stages, counted from 0


class SamplePromptsRecord(CurriculumRecord):
    """Result of sample_prompts."""

    files: list[FileRecord]
    groups: int  # groups with the reserve
    by_source: dict[str, int]  # groups without the reserve
    released: int  # groups that generate from the start
    reused: NotRequired[list[ReusedGroup]]  # in the order in which the buffer gave them
    buffered: NotRequired[int]  # groups that the buffer held
    images: NotRequired[list[FileRecord]]  # pictures of the prompts, relative to the run's folder


class SampleSupervisedRecord(CurriculumRecord):
    """The batch that sample_supervised made of reference answers or dialogues."""

    files: list[FileRecord]
    rows: int
    tokens: int  # trained tokens
    by_source: dict[str, int]
    images: NotRequired[list[FileRecord]]  # pictures of the prompts, relative to the run's folder


class RolloutRecord(TypedDict):
    """Result of rollout."""

    samples_found: int  # in parts of an earlier attempt
    seconds: float
    samples_generated: int
    tokens_generated: int
    engines_s: float  # until the engines served this iteration's weights
    # with rollout.admission=kv: samples that might be in flight at the end
    in_flight_limit: NotRequired[int]
    kv_used: NotRequired[float]  # largest share of an engine's KV cache that requests held
    queue: NotRequired[int]  # most requests that waited in an engine
    files: list[FileRecord]  # all parts


class RewardRecord(TypedDict):
    """Outcomes of scoring, and the seconds that any scoring was running."""

    scored: int
    failed: int
    timed_out: int
    skipped: int
    seconds: float
    files: list[FileRecord]  # all parts


class FilterRecord(TypedDict):
    """Verdicts on the groups that were drawn."""

    files: list[FileRecord]
    verdicts: dict[str, int]  # samples by verdict and reason
    groups_kept: int
    groups_dropped: int
    groups_returned: int
    groups_zero_variance: int
    groups_deferred: NotRequired[int]  # groups deferred to the next iteration
    dropped_by_kind: dict[str, int]  # groups, by what dropped them
    chunks: NotRequired[list[int]]  # rows of the batch whose passes are made together, in its order


class StepSettings(TypedDict):
    """Settings of an optimizer step, besides its batch and the weights; millrace.core.replay reads them."""

    configuration: dict[str, Any]  # the part of the configuration that a branch may change, as in run.json
    numerics: dict[str, Any]  # device, layout and versions, on which the last bits depend


class StepMetrics(TypedDict):
    """Metrics of one optimizer step. The algorithm adds numbers under its own names."""

    version: int  # weight version that the step made
    loss: float
    grad_norm: float
    lr: float
    logprob_gap_mean: float  # difference of the engine from the weights that sampled, nats
    logprob_gap_max: float
    # the rounding floor of the model; of the compared step, if it was measured
    logprob_gap_floor: NotRequired[float]
    logprob_gap_limit: NotRequired[float]  # mean difference above which it would have been refused
    samples: int
    tokens: int
    packs: list[int]  # tokens of each pack of the first rank
    seconds: dict[str, float]  # by phase
    tokens_per_second: float
    # share of the GPUs' peak that the passes with gradients take; of a GPU whose peak is known
    mfu: NotRequired[float]
    scored_tokens: NotRequired[
        int
    ]  # of passes without gradients, if there were any; their time is `scoring` of the seconds
    settings: StepSettings
    chunks: NotRequired[list[int]]  # rows whose passes were made together, if the step was made in chunks
    # files with the trainer's log-probabilities of the iteration; of its first step
    logprobs: NotRequired[list[FileRecord]]


class StepFile(TypedDict):
    """step.json: the optimizer steps of an iteration, in order."""

    version: int  # weight version after the last step
    steps: list[StepMetrics]
    rest_s: float  # seconds until the engines had left GPU memory to the trainer
    # seconds that the hand-over took in all, if it started while the batch was written
    handed_s: NotRequired[float]
    seconds: float


class TrainStepRecord(StepFile):
    """Result of train_step, and the entry of step.json."""

    files: list[FileRecord]
    batch: NotRequired[FileRecord]  # the batch that it trained on


class SyncWeightsRecord(TypedDict):
    """The weight version that every engine confirmed."""

    version: int
    phases: dict[str, float]  # seconds
    seconds: float
    prompt_gap: NotRequired[float]  # difference of engines from the trainer on four fixed texts, nats a token
    checksums: NotRequired[dict[str, str]]  # hash of the weights that each engine serves


class CheckpointRecord(TypedDict):
    """Paths in the run folder: what was saved, exported and removed."""

    saved: str | None
    exported: str | None
    dropped: list[str]
    seconds: float
    marker: NotRequired[FileRecord]  # complete.json of what was saved, which names the other files
    begun: NotRequired[str]  # checkpoint that is written while training continues
    # checkpoint that an earlier iteration started, and that counts from this one on
    committed: NotRequired[str]
    committed_marker: NotRequired[FileRecord]
    write_s: NotRequired[float]  # seconds that writing it took
    waited_s: NotRequired[float]  # seconds waited for it since the next checkpoint was due
    export_files: NotRequired[list[FileRecord]]


class EvaluatedSubset(TypedDict):
    """Figures of the rows of one subset."""

    samples: int
    reward_mean: float | None
    pass_at: dict[str, float]


class EvaluatedSet(TypedDict):
    """Figures of one held-out set. A sample that was not generated is in no mean of rewards; an unscored one is a 0."""

    file: FileRecord
    reward_mean: float | None  # None if no sample was generated
    samples: int
    not_scored: int  # samples without a reward: generation or scoring failed
    unscored: NotRequired[int]  # answers whose scoring failed or timed out; each counts as wrong
    response_length_mean: float
    truncated_share: float
    failed: NotRequired[int]  # samples that could not be generated
    # half of the 95 % interval of reward_mean; None of fewer than two prompts
    interval: NotRequired[float | None]
    # share of prompts whose most frequent answer is correct; None of one sample, and if the reward names no
    # answers
    majority: NotRequired[float | None]
    pass_at: NotRequired[dict[str, float]]  # pass@k by k; not with one sample
    subsets: NotRequired[dict[str, EvaluatedSubset]]


class EvaluateRecord(TypedDict):
    """Evaluation of every held-out set at one weight version."""

    version: int
    done: int  # iterations trained
    sets: dict[str, EvaluatedSet]
    seconds: float
    files: list[FileRecord]  # its parts
    images: NotRequired[list[FileRecord]]  # pictures of the sets, relative to the run's folder
    lag: NotRequired[int]  # weight versions that the trainer had made beyond this one when it ended


class HeldOutSubset(TypedDict):
    """Loss on the rows of one subset."""

    samples: int
    tokens: int  # tokens with a loss
    loss: float  # mean over these tokens, nats
    perplexity: float  # its exponential


class HeldOutSet(HeldOutSubset):
    """Loss on one held-out set."""

    file: FileRecord
    subsets: NotRequired[dict[str, HeldOutSubset]]


class HeldOutRecord(TypedDict):
    """Loss on every held-out set at one weight version."""

    version: int
    done: int  # iterations trained
    sets: dict[str, HeldOutSet]
    seconds: float
    files: list[FileRecord]  # parts of its table
    images: NotRequired[list[FileRecord]]  # pictures of the sets, relative to the run's folder


class EvaluatedMetrics(TypedDict):
    """Metrics of an evaluation, with the version of its weights."""

    version: int
    done: int  # iterations trained
    metrics: dict[str, float]


class PublishRecord(TypedDict):
    """Every metric of the iteration, by name, and what is needed to write the manifest again."""

    metrics: dict[str, float]
    committed: float  # seconds of the epoch
    driver: int | None  # token of the driver that committed it
    run: str | None  # id of the run that committed it
    manifest: str  # its hash
    evaluated: NotRequired[
        EvaluatedMetrics
    ]  # evaluation by the iteration, of the weights that it started with
    # start and end of each task in the driver that committed, seconds of the epoch
    worked: NotRequired[dict[str, list[float]]]


class IterationRecords(TypedDict, total=False):
    """The committed records of one iteration, by the name of the task."""

    sample_prompts: SamplePromptsRecord
    sample_supervised: SampleSupervisedRecord
    rollout: RolloutRecord
    reward: RewardRecord
    filter: FilterRecord
    train_step: TrainStepRecord
    sync_weights: SyncWeightsRecord
    checkpoint: CheckpointRecord
    evaluate_before: EvaluateRecord
    evaluate: EvaluateRecord
    held_out_loss_before: HeldOutRecord
    held_out_loss: HeldOutRecord
    publish: PublishRecord


@dataclass(frozen=True)
class StepRequest:
    """The step that makes weight version `version` of the one before, from the rows of a batch that name it."""

    version: int
    batch_url: str
    # with an iteration's first step: what the difference of engine and trainer may be, on the samples of any of its steps
    guard: LogprobGuard | None = None
    # its figures if it was made before: it is made under the settings of that time
    recorded: StepMetrics | None = None
    batch_sha256: str | None = None  # in the record or manifest that committed the batch
    chunks: Sequence[int] | None = None  # rows of each chunk, if passes are made chunk by chunk
    # with an iteration's first step: whether the trainer's log-probabilities are written
    stores: bool = False
    trace: str | None = None  # folder in storage that a trace of the step is written to


class Cut(BaseModel):
    """Groups by id, in the order of the iteration's list. Groups in none of the lists were dropped by a filter."""

    model_config = ConfigDict(extra="forbid")

    trained: list[str]
    deferred: dict[str, int]  # how many times each group was deferred, this time included
    returned: list[str] = []
    parts: list[str]  # parts of rewards that the cut was decided from
