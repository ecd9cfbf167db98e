"""Retries of storage failures, and the errors when retries do not help.

Owns the retries of every storage operation, with jitter and a bound. Knows nothing of what is read or written.
"""

import errno
import logging
import math
from collections.abc import Callable
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from millrace.connectors.host.local_files import FULL
from millrace.connectors.storage.injected import injected
from millrace.core.errors import MissingFileError, StorageError

log = logging.getLogger(__name__)

ATTEMPTS = 8
PROBE_S = 1.0
LONGEST_WAIT_S = 5.0
FINAL = (
    *FULL,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
)
LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "google")
FINAL_NAMES = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ParamValidationError",
    "ProfileNotFound",
)

Result = TypeVar("Result")


def retried(verb: str, url: str, call: Callable[[], Result], probe: bool = False) -> Result:
    """Make the call, with retries of transient failures. A probe gives up early, since a person waits for it.

    Raises MissingFileError if the file to read does not exist, StorageError for any other failure of the storage. Other
    exceptions are defects of millrace and pass through.
    """
    retrying = Retrying(
        stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(PROBE_S if probe else math.inf),
        wait=wait_random_exponential(multiplier=0.1, max=LONGEST_WAIT_S),
        retry=retry_if_exception(is_transient),
        before_sleep=None
        if probe
        else lambda state: log.warning("%s: cannot %s, retrying: %s", url, verb, _cause(state)),
        reraise=True,
    )
    try:
        return retrying(injected(verb, call))
    except FileNotFoundError as error:
        if verb == "write":
            raise StorageError(
                "cannot write: the bucket or folder does not exist",
                where=url,
                remedy="create it or correct the path",
            ) from error
        raise MissingFileError("no such file", where=url, remedy="restore it or correct the path") from error
    except Exception as error:
        if not is_storage_fault(error):
            raise
        raise StorageError(
            f"cannot {verb}: {error or type(error).__name__}", where=url, remedy=_remedy(error)
        ) from error


def is_storage_fault(error: BaseException) -> bool:
    """Whether an exception comes from the storage, not from a defect of millrace."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in LIBRARIES


def is_transient(error: BaseException) -> bool:
    """Whether a retry may help."""
    return (
        is_storage_fault(error)
        and getattr(error, "errno", None) not in FINAL
        and type(error).__name__ not in FINAL_NAMES
        and not isinstance(
            error, PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError
        )
    )


def _cause(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def _remedy(error: BaseException) -> str:
    if getattr(error, "errno", None) in FULL:
        return "the disk is full: free space and start again; nothing committed is lost"
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "check the permissions and the credentials in the environment"
    if not is_transient(error):
        return "correct the path"
    return "it failed repeatedly: repair the storage and start again; nothing committed is lost"
