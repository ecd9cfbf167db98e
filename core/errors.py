"""Errors that a user can mend. Each names the field or the file, and the remedy."""

from __future__ import annotations


class MillraceError(Exception):
    """Base of all errors that millrace raises for people to read."""


class ConfigError(MillraceError):
    """The configuration cannot work; the message names field, value and remedy."""


class DataError(MillraceError):
    """Prompts cannot be read or used."""


class StorageError(MillraceError):
    """A file is missing, corrupt or cannot be written; the message names it."""


class MissingFileError(StorageError):
    """A file that was promised is not there."""


class CorruptFileError(StorageError):
    """A file does not have the hash, rows or schema that its manifest names."""


class EngineError(MillraceError):
    """An engine cannot do what it was asked."""


class TrainerError(MillraceError):
    """The trainer cannot do what it was asked."""


class TrainerMemoryError(TrainerError):
    """A rank's memory, of GPU or host, does not suffice; the message names the fields to change. Trying again cannot help."""


class RefusedStepError(TrainerError):
    """A train step was refused by what its batch gives, and nothing was applied. Trying again gives the same."""


class TrainerStalledError(TrainerError):
    """A rank does not come back from a call. It must be ended and made anew."""


class BudgetError(MillraceError):
    """More failed than the configuration allows; the message names the cause. Nothing done is lost."""


class ActorLostError(MillraceError):
    """A live part of the run died; it can be rebuilt from storage."""


class EngineLostError(EngineError):
    """An engine did not answer, or answered that it cannot; another try elsewhere may succeed."""


class EngineStalledError(EngineLostError):
    """An engine answers but generates nothing, although it has requests and is not paused."""


LASTING = ConfigError | TrainerMemoryError | RefusedStepError
"""Errors that come again as long as nothing is changed."""


def first_error(error: BaseException) -> BaseException:
    """The first error inside exception groups: of a task group's, what made the others end."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
