"""Conditional writes, on which leases and commits rely, and JSON documents that contain their own hash.

A store refuses a conditional write if the file changed since the writer last saw it. Owns the condition for each kind of store:
a lock within this process for memory, If-None-Match and If-Match on S3, the `create` mode of other object stores. A trial write
shows which of them a store really honours. A document names its place and its run; one without a hash is refused, so a reader may
rely on its fields. Knows nothing of what is written.
"""

import contextlib
import errno
import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from millrace.core.errors import CorruptFileError

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


HASH, PLACE, RUN = "sha256", "sealed_at", "sealed_by"
RESTORE = "restore the file from a copy"


def sealed(content: Mapping[str, Any], place: str, run: str | None = None) -> dict[str, Any]:
    """The content with its place, its run and its hash, so that no other document can replace it.

    place: the end of its URL. run: id of the run that writes it, None if a reader need not check it.
    """
    placed = {**content, PLACE: place, **({} if run is None else {RUN: run})}
    return {**placed, HASH: content_hash(placed)}


def content_hash(content: Mapping[str, Any]) -> str:
    """Hash of a document as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_seal(content: Any, url: str) -> dict[str, Any]:
    """The content without hash and place. Raises CorruptFileError if it changed, or was written at another place."""
    if not isinstance(content, dict):
        raise CorruptFileError("holds no JSON object", where=url, remedy=RESTORE)
    opened = {name: value for name, value in content.items() if name not in (HASH, PLACE, RUN)}
    if HASH not in content or PLACE not in content:
        raise CorruptFileError("lacks the hash that it was written with", where=url, remedy=RESTORE)
    if content_hash({name: value for name, value in content.items() if name != HASH}) != content[HASH]:
        raise CorruptFileError("its content does not have the hash that it names", where=url, remedy=RESTORE)
    if not f"/{url}".endswith(f"/{content[PLACE]}"):
        raise CorruptFileError(f"was written as {content[PLACE]}", where=url, remedy=RESTORE)
    return opened
