"""The functions that users bring, as Protocols, and how they are found by import path.

Owns the signatures (frozen by a test) and the loading; knows nothing of who calls a hook when. A hook is named in the
configuration as `package.module:function`. What a hook raises fails its sample with the reason, not the run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from millrace.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from millrace.core.algorithms.objective import TokenBatch
    from millrace.core.config import RunConfig, UserFunction

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


@dataclass(frozen=True)
class RewardResult:
    """A reward and the named parts it is made of; all finite."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupSample:
    """A sample as group filters see it. `reward` is None unless `scoring` is "scored"."""

    sample_id: str
    reward: float | None
    scoring: str = "scored"  # scored, failed, timed_out, skipped


@dataclass(frozen=True)
class Generated:
    """One response that a generate hook made, token by token."""

    tokens: Sequence[int]  # response ids, observations of tools included
    logprobs: Sequence[float]  # of each token under the policy; 0 where loss_mask is 0
    loss_mask: Sequence[int]  # 1: the policy's own token, trained on
    text: str
    status: str  # completed, truncated
    turns: int = 1


@runtime_checkable
class Generate(Protocol):
    """Makes one response, in as many turns as it likes; `engine(input_ids, sampling)` continues a token sequence."""

    def __call__(
        self,
        sample: RewardInput,
        prompt_tokens: Sequence[int],
        engine: Callable[[Sequence[int], Mapping[str, Any]], Awaitable[Generated]],
        sampling: Mapping[str, Any],
    ) -> Awaitable[Generated]: ...


@runtime_checkable
class Reward(Protocol):
    """Scores one sample; runs in a process of its own that may be killed. Sync or async."""

    def __call__(
        self, sample: RewardInput, **options: Any
    ) -> float | RewardResult | Awaitable[float | RewardResult]: ...


@runtime_checkable
class GroupReward(Protocol):
    """Scores all samples of one prompt together; one answer a sample, in order."""

    def __call__(self, samples: Sequence[RewardInput], **options: Any) -> Sequence[float | RewardResult]: ...


@runtime_checkable
class GroupFilter(Protocol):
    """Decides on a scored group: None keeps it, text drops it for that reason."""

    def __call__(self, samples: Sequence[GroupSample]) -> str | None: ...


@runtime_checkable
class BufferFilter(Protocol):
    """Which of the waiting groups an iteration takes: indices into `groups`, in order of preference."""

    def __call__(
        self, groups: Sequence[Sequence[GroupSample]], need: int, iteration: int
    ) -> Sequence[int]: ...


@runtime_checkable
class Advantage(Protocol):
    """Advantage of each sample [B] from rewards [B] (NaN: not scored) and group numbers [B]."""

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor: ...


@runtime_checkable
class Loss(Protocol):
    """Loss of each token [N], to be weighted by `batch.weights`, and metrics as (weighted sum, weight)."""

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]: ...


@runtime_checkable
class RewardShaping(Protocol):
    """Rewards [B] that advantages are computed from; the stored reward stays. Lengths [B] in tokens, truncated [B] bool."""

    def __call__(self, rewards: Tensor, response_lengths: Tensor, truncated: Tensor) -> Tensor: ...


@runtime_checkable
class DataSource(Protocol):
    """The rows of a source: mappings with the keys that the source's configuration names, in a stable order."""

    def __call__(self, path: str) -> Iterable[Mapping[str, Any]]: ...


@runtime_checkable
class Evaluate(Protocol):
    """Further figures of an evaluation, by name, from its scored samples."""

    def __call__(
        self, inputs: Sequence[RewardInput], samples: Sequence[GroupSample], version: int
    ) -> Mapping[str, float]: ...


@runtime_checkable
class OnBatch(Protocol):
    """Sees each batch (url of batch.parquet) before it is trained."""

    def __call__(self, config: RunConfig, iteration: int, batch_url: str) -> None: ...


@runtime_checkable
class OnStep(Protocol):
    """Sees the metrics of each optimizer step after it."""

    def __call__(self, config: RunConfig, version: int, metrics: Mapping[str, float]) -> None: ...


HOOKS: dict[str, type] = {
    "generate": Generate,
    "reward": Reward,
    "group_reward": GroupReward,
    "group_filter": GroupFilter,
    "buffer_filter": BufferFilter,
    "advantage": Advantage,
    "loss": Loss,
    "reward_shaping": RewardShaping,
    "data_source": DataSource,
    "evaluate": Evaluate,
    "on_batch": OnBatch,
    "on_step": OnStep,
}


def load(path: str, field_name: str = "hook") -> Callable[..., Any]:
    """The function at `package.module:function` (`function` may be dotted), named by `field_name` of the configuration.

    Errors: ConfigError naming field, path and remedy when it has another form, cannot be imported, is not there
    or cannot be called.
    """
    where = f"{field_name} = {path}"
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError("no import path", where=where, remedy="write it as package.module:function")
    _search_working_folder()
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"cannot be imported: {error}",
            where=where,
            remedy="correct the path, start from the folder that holds it, or put its package on PYTHONPATH",
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError(
                f"{module_name} has no function {name}",
                where=where,
                remedy="correct the part after the colon",
            )
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{name} is a {type(target).__name__}", where=where, remedy="name a function")
    return target  # type: ignore[no-any-return]


def load_function(function: UserFunction, field_name: str) -> Callable[..., Any]:
    """The function of a configuration's field with its options bound: call it with positional arguments.

    Errors: ConfigError as of `load`, naming `field_name`.function.
    """
    loaded = load(function.function, f"{field_name}.function")
    return partial(loaded, **function.options) if function.options else loaded


def _search_working_folder() -> None:
    """Import from the working folder first, as `python -m` does; the installed commands do not by themselves."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
