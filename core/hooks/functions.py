"""Protocols of the functions that users bring, and how these are loaded by import path.

Owns the signatures (frozen by a test) and the loading; does not know who calls a function. The configuration names
each as {function: package.module:name, options: {...}}; options are handed over as keyword arguments.

What happens when a function raises or returns something unusable:

- a reward: the sample fails with the reason. In training it counts as not scored, never as zero;
  reward.max_failed_share bounds how many. In evaluation it counts as wrong, and eval/<set>/unscored says how many.
- a hint for a teacher: as a reward.
- a group filter: its group is dropped with the reason; filter.max_failed_share bounds how many.
- any other: the run stops with an error that names the function. What is stored stays, and the run continues from it.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from millrace.core.contracts.references import resolved, scrubbed
from millrace.core.errors import ConfigError, MillraceError, described, remedy_of
from millrace.core.hooks.own_code import check_unchanged
from millrace.core.hooks.slime.names import SLIME, NotHereError, provide, slime_remedy

if TYPE_CHECKING:
    from torch import Tensor

    from millrace.core.config import UserFunction
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


def _closed(module_name: str) -> str:
    """The remedy if a folder on the way to a module cannot be read, which Python treats as a folder without modules."""
    parts = module_name.split(".")
    for entry, length in itertools.product(sys.path, range(len(parts))):
        folder = os.path.join(entry, *parts[:length])
        try:
            os.scandir(folder).close()
            os.stat(
                os.path.join(folder, os.curdir)
                # a folder may be listed although files in it may not be looked up
            )
        except PermissionError as error:
            return f"{folder} cannot be read: {remedy_of(error, '')}"
        except OSError:
            # another entry of the path may have the module
            continue
    return ""


def load(path: str, field_name: str = "hook") -> Callable[..., Any]:
    """The function at `package.module:function` (`function` may be dotted), named by `field_name` of the configuration.

    Errors: ConfigError naming field, path and remedy when it has another form, cannot be imported, is not there
    or cannot be called.
    """
    where = f"{field_name} = {path}"
    module_name, name = module_and_name(path)
    if not module_name or not name:
        raise ConfigError("no import path", where=where, remedy="write it as package.module:function")
    search_in()
    if written_for_slime(path):
        provide()
    fresh = module_name not in sys.modules
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"cannot be imported: {error}",
            where=where,
            remedy=_rename(module_name)
            or _closed(module_name)
            or slime_remedy(error)
            or "correct the path, put the module beside the YAML file or into the folder where you start, or its package on "
            "PYTHONPATH",
        ) from error
    if fresh:
        try:
            check_unchanged(target, where)
        except ConfigError:
            # so that the next import gives the same error
            del sys.modules[module_name]
            raise
    for part in name.split("."):
        try:
            there = hasattr(target, part)
        except NotHereError as error:
            raise ConfigError(str(error), where=where, remedy=error.remedy) from error
        if not there:
            raise ConfigError(
                f"{module_name} has no function {name}",
                where=where,
                remedy=_rename(module_name) or "correct the part after the colon",
            )
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{name} is a {type(target).__name__}", where=where, remedy="name a function")
    return target  # type: ignore[no-any-return]


def module_and_name(path: str) -> tuple[str, str]:
    """Module and function of `package.module:function`, or of `slime:package.module.function`, which has slime's signature."""
    module_name, _, name = path.partition(":")
    if module_name == SLIME:
        module_name, _, name = name.rpartition(".")
    return module_name, name


def written_for_slime(path: str) -> bool:
    """Whether the function at this import path has slime's signature."""
    return path.startswith(f"{SLIME}:")


def load_function(function: UserFunction, field_name: str) -> Callable[..., Any]:
    """The function of a configuration's field with its options bound: call it with positional arguments.

    Errors: ConfigError as of `load`, naming `field_name`.function, and of a reference in the options to what is not set.
    """
    loaded = load(function.function, f"{field_name}.function")
    options = resolved(function.options, f"{field_name}.options")
    return partial(loaded, **options) if options else loaded


def call_function(function: UserFunction, field_name: str, *args: Any) -> Any:
    """What the function of a configuration's field returns for these arguments and its options.

    Errors: ConfigError naming field and function for any error that it raises, millrace's errors included, and as of `load`.
    Errors of a function that millrace brings are raised unchanged.
    """
    loaded = load_function(function, field_name)
    try:
        return loaded(*args)
    except Exception as error:  # noqa: BLE001 - a function of the user's may raise anything
        if isinstance(error, MillraceError) and function.function.startswith("millrace."):
            raise
        # the text shows the errors that it was raised from too
        story = "".join(traceback.format_exception(error))
        raise ConfigError(
            f"it raised {failure_of(error, function)}",
            where=f"{field_name}.function = {function.function}",
            remedy="correct the function and start the run again",
        ) from (error if story == cleaned(story, function) else None)


def failure_of(error: Exception, function: UserFunction) -> str:
    """An error of a user's function as text: type, message and line, without the secrets of its options."""
    return cleaned(described(error), function)


def cleaned(text: str, function: UserFunction) -> str:
    """A text of a user's function without secrets: of its options, and secrets that are recognised by their place."""
    # imported here, since names of hooks load no library
    from millrace.core.config.parts.redaction import shown_text

    return shown_text(scrubbed(text, function.options))


def search_in(folders: Sequence[str] = ()) -> None:
    """From now on, modules are found in these folders too, then in the working folder, after all installed packages.

    Processes that this one starts by multiprocessing search the same folders.
    """
    sys.path += [folder for folder in (*folders, os.getcwd()) if folder not in sys.path]


def hidden_module(path: str) -> tuple[str, str] | None:
    """A second place of a function's module, and the place that it is imported from; None if there is only one.

    path: package.module:function, not millrace's own. The first place on the search path hides the other.
    """
    name = module_and_name(path)[0].partition(".")[0]
    found = (_place(PathFinder.find_spec(name, [folder])) for folder in sys.path if name != "millrace")
    imported, *hidden = dict.fromkeys(filter(None, found)) or [""]
    return (hidden[0], imported) if hidden else None


def _place(spec: ModuleSpec | None) -> str | None:
    """The file of a module, or the folder of a package without one."""
    if spec is None:
        return None
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return next((os.path.realpath(place) for place in places if place and os.path.exists(place)), None)


def _rename(module_name: str) -> str:
    """The remedy if one module hides another of the same name; else empty."""
    hidden = hidden_module(module_name)
    return f"rename the one of yours: {hidden[1]} is imported, and hides {hidden[0]}" if hidden else ""
