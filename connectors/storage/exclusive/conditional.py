"""Writes that a store refuses where the file is not as the writer last saw it: what leases and commits rest on.

Owns how each kind of store is asked: a lock within this process for memory, If-None-Match and If-Match on S3, the `create` mode
of other object stores. Which of them a store truly honours is tried, not believed. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import uuid
from collections.abc import Callable
from typing import Any

SINGLE_PUT = 5 << 30  # bytes; a larger object is sent in parts, which have no condition
S3 = ("s3", "s3a")
PRECONDITION = ("PreconditionFailed", "412", "ConditionNotMet")
NOT_OFFERED = ("NotImplemented", "501", "InvalidArgument", "MethodNotAllowed")
_memory = threading.Lock()


class NotOfferedError(Exception):
    """The store takes no conditions."""


def create(fs: Any, protocol: str, path: str, data: bytes) -> bool:
    """Write a new object; False if one is there. Raises NotOfferedError, or what the filesystem raises."""
    if protocol == "memory":
        with _memory:
            if fs.exists(path):
                return False
            fs.pipe_file(path, data)
        return True
    return _accepted(lambda: fs.pipe_file(path, data, mode="create", **_one_put(protocol, data)))


def replace(fs: Any, path: str, data: bytes, etag: str) -> bool:
    """Overwrite an object of S3; False if it is not the one with this ETag."""
    return _accepted(lambda: fs.pipe_file(path, data, IfMatch=etag, **_one_put("s3", data)))


def etag(fs: Any, path: str) -> str | None:
    """The ETag of an object of S3, None if there is none."""
    try:
        return str(fs.info(path)["ETag"])
    except FileNotFoundError:
        return None


def tried(fs: Any, protocol: str, folder: str) -> tuple[bool, bool]:
    """Whether the store refuses to create an object twice, and to replace one that has changed. Writes a small object."""
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
    """Options by which s3fs sends the data in one request."""
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
    """The code of an S3 API's refusal, empty for other errors."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
