"""JSON documents that contain their own hash, so that a reader notices any change after the write.

Owns the hash, and the place and run that a document names. Knows nothing of what documents say. A document without a hash is
refused, so a reader may rely on its fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from millrace.core.errors import CorruptFileError

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
