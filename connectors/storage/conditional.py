"""Conditional writes: a store refuses them if the file changed since the writer last saw it. Leases and commits rely on them.

Owns the condition for each kind of store: a lock within this process for memory, If-None-Match and If-Match on S3, the `create`
mode of other object stores. A trial write shows which of them a store really honours. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import uuid
from collections.abc import Callable
from typing import Any

SINGLE_PUT = 5 << 30  # bytes; a larger object is sent in parts, without a condition
S3 = ("s3", "s3a")
PRECONDITION = ("PreconditionFailed", "412", "ConditionNotMet")
NOT_OFFERED = ("NotImplemented", "501", "InvalidArgument", "MethodNotAllowed")
_memory = threading.Lock()


class NotOfferedError(Exception):
    """The store does not accept conditions."""


def create(fs: Any, protocol: str, path: str, data: bytes) -> bool:
    """Write a new object; False if it exists. Raises NotOfferedError, or the filesystem's errors."""
    if protocol == "memory":
        with _memory:
            if fs.exists(path):
                return False
            fs.pipe_file(path, data)
        return True
    return _accepted(lambda: fs.pipe_file(path, data, mode="create", **_one_put(protocol, data)))


def replace(fs: Any, path: str, data: bytes, etag: str) -> bool:
    """Overwrite an object on S3; False if its ETag is another."""
    return _accepted(lambda: fs.pipe_file(path, data, IfMatch=etag, **_one_put("s3", data)))


def etag(fs: Any, path: str) -> str | None:
    """The ETag of an object on S3, None if the object does not exist."""
    try:
        return str(fs.info(path)["ETag"])
    except FileNotFoundError:
        return None


def tried(fs: Any, protocol: str, folder: str) -> tuple[bool, bool]:
    """Whether the store refuses to create an object twice, and to replace a changed one. Tries it with a small object."""
    probe = f"{folder}/.millrace-probe-{uuid.uuid4().hex}"
    try:
        if not create(fs, protocol, probe, b"1"):
            return False, False
        creates = not create(fs, protocol, probe, b"2")
        replaces = (
            creates and protocol in S3 and not replace(fs, probe, b"3", '"00000000000000000000000000000000"')
        )
    except NotOfferedError:
        return False, False
    finally:
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(probe)
    return creates, replaces


def _one_put(protocol: str, data: bytes) -> dict[str, int]:
    """Options that make s3fs send the data in one request."""
    return {"chunksize": min(SINGLE_PUT, max(50 << 20, len(data)))} if protocol in S3 else {}


def _accepted(put: Callable[[], Any]) -> bool:
    try:
        put()
    except FileExistsError:
        return False
    except OSError as error:
        code = _code(error)
        if code in PRECONDITION:
            return False
        if code in NOT_OFFERED or error.errno == errno.ENOTSUP:
            raise NotOfferedError from error
        raise
    return True


def _code(error: OSError) -> str:
    """The error code of an S3 API, "" for other errors."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
