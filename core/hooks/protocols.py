"""Protocols of the functions that users bring. A test freezes the signatures.

The configuration names each function as {function: package.module:name, options: {...}}; options are handed over as keyword
arguments.

What happens when a function raises or returns something unusable:

- a reward: the sample fails with the reason. In training it counts as not scored, never as zero;
  reward.max_failed_share bounds how many. In evaluation it counts as wrong, and eval/<set>/unscored says how many.
- a hint for a teacher: as a reward.
- a group filter: its group is dropped with the reason; filter.max_failed_share bounds how many.
- any other: the run stops with an error that names the function. What is stored stays, and the run continues from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from millrace.core.contracts.token_batch import TokenBatch

Prompt = str | Sequence[Mapping[str, Any]]  # text, or chat messages


@dataclass(frozen=True)
class RewardInput:
    """A finished sample as rewards see it. Text is for reading and scoring; it is never tokenised again."""

    prompt: Prompt
    response: str
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    response_length: int = 0  # tokens
    status: str = "completed"  # completed, truncated
    # the whole dialogue, of a rollout of several turns; `response` is its last turn
    messages: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class RewardResult:
    """A reward, its parts, and the answer that it found.

    parts: finite numbers, whose means are metrics, and texts (a judge's words), which are stored and shown. answer: in the
    reward's normal form, so that equal answers are one text; empty if it found none, None if it looks for none.
    """

    reward: float
    parts: Mapping[str, float | str] = field(default_factory=dict)
    answer: str | None = None

    def __float__(self) -> float:
        """The reward alone, for rewards that are computed from others."""
        return float(self.reward)


Score = float | RewardResult | Mapping[str, float | str | None]  # what a reward function may return


@dataclass(frozen=True)
class GroupSample:
    """A sample as group filters see it. `reward` is None unless `scoring` is "scored".

    For a rollout with several branches: mean reward and parts, tokens of all branches, and the first branch as `input`.
    """

    sample_id: str
    reward: float | None
    scoring: str = "scored"  # scored, failed, timed_out, skipped
    response_length: int = 0  # tokens
    truncated: bool = False  # cut at the token limit
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of the reward
    input: RewardInput = field(default_factory=lambda: RewardInput("", ""))  # the input of its reward


@dataclass(frozen=True)
class BufferedGroup:
    """A trained group that may be trained once more, as buffer filters see it."""

    iteration: int  # the iteration that generated it, from 0
    ordinal: int  # its prompt's number among the groups that the iteration drew
    source: str
    age: int  # weight versions between its samples and the weights to be trained
    uses: int  # times that it was trained
    reward: float | None  # mean of its scored rollouts
    reward_std: float | None  # standard deviation of these; None if the iteration had no buffer


@runtime_checkable
class Reward(Protocol):
    """Scores one sample; runs in a separate process that may be killed. Sync or async.

    A mapping names its parts: its key `reward` is the reward, a text at `answer` the answer, every other key is a part.
    """

    def __call__(self, sample: RewardInput, **options: Any) -> Score | Awaitable[Score]: ...


class NumberedRows(Protocol):
    """Rows of a source by number, such as a list of mappings."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Mapping[str, Any]: ...


@runtime_checkable
class DataSource(Protocol):
    """Gives the rows of a source: a list, or an object with `__len__` and `__getitem__(number)`; each row is a mapping.

    Called once in a separate process, and with `level` for each level of a source with levels. The same number must give
    the same row in every process.
    """

    def __call__(self, **options: Any) -> NumberedRows: ...


@runtime_checkable
class GroupFilter(Protocol):
    """Decides on a scored group: None keeps it, text drops it for that reason. It must answer the same for the same group."""

    def __call__(self, samples: Sequence[GroupSample], **options: Any) -> str | None: ...


@runtime_checkable
class BufferFilter(Protocol):
    """Chooses among the groups held for reuse: returns the groups to take, in their order.

    It must answer the same for the same groups.
    """

    def __call__(self, groups: Sequence[BufferedGroup], **options: Any) -> Sequence[BufferedGroup]: ...


@runtime_checkable
class TeacherHint(Protocol):
    """Returns text about a sample that is added to a served teacher's prompt, not to the policy's; None adds nothing.

    Runs in the processes of rewards.
    """

    def __call__(self, sample: RewardInput, **options: Any) -> str | None: ...


@runtime_checkable
class RewardShaping(Protocol):
    """Returns the rewards [B] for advantages; stored rewards stay. Lengths [B] in tokens,
    truncated [B] bool.
    """

    def __call__(
        self, rewards: Tensor, response_lengths: Tensor, truncated: Tensor, **options: Any
    ) -> Tensor: ...


@runtime_checkable
class Advantage(Protocol):
    """Advantage of each sample [B] from shaped rewards [B] and group numbers [B], equal for samples of one prompt."""

    def __call__(self, rewards: Tensor, group_ids: Tensor, **options: Any) -> Tensor: ...


@runtime_checkable
class Loss(Protocol):
    """Loss of each token [N], which `batch.weights` weigh, and metrics as (weighted sum, weight) by name."""

    def __call__(
        self, batch: TokenBatch, **options: Any
    ) -> tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]: ...


HOOKS: dict[str, type] = {
    "rows": DataSource,
    "reward": Reward,
    "group_filter": GroupFilter,
    "buffer_filter": BufferFilter,
    "teacher_hint": TeacherHint,
    "reward_shaping": RewardShaping,
    "advantage": Advantage,
    "loss": Loss,
}
