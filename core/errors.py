"""Errors that a user can fix. Each names the field or file, the reason and the remedy.

    raise ConfigError("holds no rows", where="data.sources.sums.path = x.jsonl", remedy="give a file with prompts")

reads `data.sources.sums.path = x.jsonl: holds no rows; give a file with prompts`. Code that catches an error reads its
fields and never takes the sentence apart.
"""

import asyncio
import contextlib
import os
import shlex
import sysconfig
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from millrace.core.plain_text import printable, whole

PACKAGES = ("core", "connectors", "tasks", "flows")
# a checkout's package has links to its folders, which resolve() would follow
_HERE = Path(__file__).parents[1]
_OURS = tuple(f"{folder}{os.sep}" for name in PACKAGES for folder in (_HERE / name, (_HERE / name).resolve()))
_LIBRARY = f"{sysconfig.get_paths()['stdlib']}{os.sep}"


DEFAULT_ROOT = "runs"  # commands look for runs here


def of_run(run: str, url: str, *words: str) -> str:
    """The arguments of a command about a run, as a message names it: they hold wherever the command is typed.

    url: of the run's folder. words: further ones.
    """
    root = url.rpartition("/")[0]
    named = () if root in (DEFAULT_ROOT, os.path.abspath(DEFAULT_ROOT)) else ("--root", shlex.quote(root))
    return " ".join((run, *words, *named))


def remedy_of(error: BaseException, otherwise: str) -> str:
    """What to do about a path that cannot be opened; `otherwise` if this user's rights and the kind of path are not the cause."""
    if error.__cause__ and not isinstance(error, OSError):
        return remedy_of(error.__cause__, otherwise)
    if isinstance(error, PermissionError):
        return f"give this user (uid {os.geteuid()}) the right to it, or name another"
    if isinstance(error, IsADirectoryError):
        return "a folder is there: name a file"
    if isinstance(error, NotADirectoryError):
        return "a file is there: name a folder"
    return otherwise


class MillraceError(Exception):
    """Base of all errors that millrace raises for people to read.

    `reason` says what is wrong, `where` names the field or file, `remedy` says what to do. Only the reason is required.
    A reason of several lines has its remedy on a separate line.
    """

    def __init__(self, reason: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(
            whole(reason)
            # pickle makes the error again from its args and the instance's attributes
        )
        self.reason, self.where, self.remedy = whole(reason), whole(where), whole(remedy)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        between = "\n" if "\n" in self.reason else "; "
        return f"{place}{self.reason}" + (f"{between}{self.remedy}" if self.remedy else "")


class ConfigError(MillraceError):
    """The configuration cannot work."""


class DataError(MillraceError):
    """Prompts cannot be read or used."""


class MissingColumnError(DataError):
    """A source has no column of the name that the configuration gives."""


class StorageError(MillraceError):
    """A file is missing, corrupt or cannot be written."""


class MissingFileError(StorageError):
    """A file that must exist does not."""


class CorruptFileError(StorageError):
    """A file does not have the hash, rows or schema that its manifest names."""

    def __init__(self, reason: str, *, where: str = "", remedy: str = "restore the file") -> None:
        super().__init__(reason, where=where, remedy=remedy)


class LeaseHeldError(MillraceError):
    """Another process drives this run."""


class TrackerError(MillraceError):
    """A tracker does not take what it is given. The run goes on, and gives it again."""


class EngineError(MillraceError):
    """An engine cannot do what was asked of it."""


class TrainerError(MillraceError):
    """The trainer cannot do what was asked of it."""


class TrainerMemoryError(TrainerError):
    """A rank ran out of GPU or host memory. The remedy names the fields to change; a retry cannot help."""


class RefusedStepError(TrainerError):
    """A train step was refused because of its batch, and nothing was applied. A retry gives the same."""


class ReplayedStepError(TrainerError):
    """A repeated step differs from the recorded one. A retry gives the same."""


class TrainerStalledError(TrainerError):
    """A rank does not return from a call. It must be ended and rebuilt."""


class BudgetError(MillraceError):
    """More failed than the configuration allows. Work that was committed is kept."""


class ActorLostError(MillraceError):
    """A live part of the run died; it can be rebuilt from storage."""


class StalledError(MillraceError):
    """A wait saw no progress for too long. A task is tried once more; a second stall ends the run."""


class ActorStalledError(StalledError, ActorLostError):
    """A live part of the run made no progress in a call and was ended."""


class WeightsDifferError(EngineError):
    """Engines hold other weights than the trainer. A start sends them again."""


class PortTakenError(EngineError):
    """A server ended because another process took its port after its choice. A start with other ports may succeed."""


class EngineLostError(EngineError):
    """An engine did not answer, or answered that it cannot; another engine may succeed."""


class EngineStalledError(EngineLostError):
    """An engine answers but generates nothing, although it has requests and is not paused."""


LASTING = (
    ConfigError
    | LeaseHeldError
    | TrainerMemoryError
    | RefusedStepError
    | ReplayedStepError
    | BudgetError
    | WeightsDifferError
)
"""Errors that repeat until the user changes something."""


def may_pass(error: BaseException) -> bool:
    """Whether a run that failed by this error may continue without changes when restarted: a part died, or storage failed."""
    passing = isinstance(error, ActorLostError | EngineError | TrainerError | StorageError)
    return passing and not isinstance(error, LASTING | MissingFileError | CorruptFileError | StalledError)


def described(error: BaseException) -> str:
    """An error of a user's function as text: its name, its message, and the line of the user's file."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the class is the user's
        message = ""
    said = printable(f"{type(error).__name__}: {message}" if message else type(error).__name__)
    return said + printable(_line(error))


def _line(error: BaseException) -> str:
    """The line of the user's code that raised the error, or called what raised it. Empty without code of the user's."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_OURS, "<"))
    ]
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(_LIBRARY)]
    installed = [f for f in frames if "site-packages" in f.filename]
    for found in (own, installed):
        if found:
            return f" in {Path(found[-1].filename).name}, line {found[-1].lineno}"
    return ""


def first_error(error: BaseException) -> BaseException:
    """The first error inside exception groups: in a task group, the error that made the other tasks end."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextlib.contextmanager
def only_first_error() -> Iterator[None]:
    """Raise the first error of task groups by itself, without the groups around it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise first_error(group) from None


@contextlib.asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first error by itself."""
    with only_first_error():
        async with asyncio.TaskGroup() as group:
            yield group
