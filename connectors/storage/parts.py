"""Parts: tables appended to a folder, each a file with a unique name, written atomically.

Names are never reused, so a task that starts again adds parts and overwrites none. A name contains the token of the driver that
wrote it, and the first digits of the content's hash, so that a part can be verified before a manifest names it.

A driver that takes over an open iteration first notes which parts it found. Parts of earlier drivers that land later do not
count: their writers had lost the lease, and their samples are generated again.
"""

from __future__ import annotations

import hashlib
import logging
import re
import uuid
from collections.abc import Sequence

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from millrace.connectors.storage import tables
from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.sealed import RUN
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError

log = logging.getLogger(__name__)

PART_FOLDERS = ("rollouts", "turns", "rewards", "evaluations")  # of an iteration
# the token of the driver that wrote it, and the first digits of its hash; parts of earlier releases lack them
PART = re.compile(r"part-(?:(\d{6,})-)?[0-9a-f]{32}(?:\.([0-9a-f]{16}))?\.parquet")
TAKEOVER = re.compile(r"^takeover-(\d{6,})\.json$")


class _Takeover(BaseModel):
    """Names of the parts that a driver found when it took over, by folder."""

    model_config = ConfigDict(extra="forbid")

    parts: dict[str, list[str]]


def write_part(store: Store, folder: str, table: pa.Table, kind: str) -> FileEntry:
    """Append a part."""
    data = tables.encode(table, kind)
    token = store.fence.token if store.fence else 0
    name = f"part-{token:06d}-{uuid.uuid4().hex}.{hashlib.sha256(data).hexdigest()[:16]}.parquet"
    entry = store.write(f"{folder}/{name}", data, unique=True)
    return entry.model_copy(update={"rows": table.num_rows, "table": kind})


def take_over_parts(store: Store, folders: Sequence[str], token: int, run: str | None = None) -> None:
    """Note the parts that count now. From now on those of drivers before `token` that land do not. run: its id."""
    parts = {
        folder: [path.removeprefix(f"{folder}/") for path in list_parts(store, folder)] for folder in folders
    }
    name = f"takeover-{token:06d}.json"
    iteration = "/".join(store.url.split("/")[-2:])
    store.write_sealed(name, _Takeover(parts=parts).model_dump(), place=f"{iteration}/{name}", run=run)


def list_parts(store: Store, folder: str) -> list[str]:
    """Paths of a folder's parts that count, sorted. Of parts with one content, which only a copy makes, the first counts.

    Raises CorruptFileError if the note of the newest takeover is broken.
    """
    paths = store.list()
    names = [path.removeprefix(f"{folder}/") for path in paths if path.startswith(f"{folder}/")]
    parts = [name for name in names if PART.fullmatch(name)]
    takeovers = {int(match[1]): path for path in paths if (match := TAKEOVER.match(path))}
    if takeovers:
        newest = max(takeovers)
        noted = set(_read_takeover(store, takeovers[newest]).parts.get(folder, []))
        parts = [name for name in parts if name in noted or _token(name) >= newest]
        parts = sorted({*parts, *_unlisted(store, folder, noted - set(parts))})
    found: dict[str, str] = {}
    for name in parts:
        content = name.split(".", 1)[1] if name.count(".") > 1 else name
        if found.setdefault(content, name) != name:
            log.warning("%s: a copy of %s, which counts", store.url_of(f"{folder}/{name}"), found[content])
    return [f"{folder}/{name}" for name in found.values()]


def _unlisted(store: Store, folder: str, names: set[str]) -> list[str]:
    """Those of the noted parts that are there although a listing lacks them, which only an object store's does."""
    if store.local:
        return []
    there = store.existing(f"{folder}/{name}" for name in sorted(names))
    return [path.removeprefix(f"{folder}/") for path in there]


def list_takeovers(store: Store) -> list[str]:
    """Paths of the notes of takeovers in an iteration's folder."""
    return [path for path in store.list() if TAKEOVER.match(path)]


def check_takeover(store: Store, path: str) -> object:
    """The id of the run that a note of a takeover names, if any. Raises CorruptFileError if it is not what was written."""
    _read_takeover(store, path)
    return store.read_json(path).get(RUN)


def read_parts(
    store: Store,
    folder: str,
    kind: str,
    *,
    columns: list[str] | None = None,
    entries: Sequence[FileEntry] | None = None,
    ignore_incomplete: bool = False,
) -> pa.Table:
    """All rows of a folder's parts, in the order of their paths; given entries, of the parts that they name, each checked.

    A broken part raises CorruptFileError; with `ignore_incomplete` it is removed with a log line.
    """

    def read(part: tuple[str, FileEntry | None]) -> pa.Table | None:
        path, entry = part
        try:
            return store.read_table(path, kind, entry, columns)
        except CorruptFileError as error:
            if not ignore_incomplete:
                raise
            log.warning("removing a broken part: %s", error)
            store.remove(path)
            return None

    parts: list[tuple[str, FileEntry | None]] = (
        [(path, None) for path in list_parts(store, folder)]
        if entries is None
        else [(entry.path, entry) for entry in entries if entry.path.startswith(f"{folder}/")]
    )
    empty = schema.schema(kind).empty_table()
    tables_read = [table for table in in_threads(read, parts) if table is not None]
    return pa.concat_tables([empty.select(columns) if columns else empty, *tables_read])


def _token(name: str) -> int:
    """Token of the driver that wrote a part; 0 for parts of releases that noted none."""
    match = PART.fullmatch(name)
    return int(match[1]) if match and match[1] else 0


def _read_takeover(store: Store, path: str) -> _Takeover:
    try:
        return _Takeover.model_validate(store.read_sealed(path))
    except (ValidationError, CorruptFileError) as error:
        raise CorruptFileError(
            "does not say which parts count",
            where=store.url_of(path),
            remedy="restore it, or remove it: then all parts count",
        ) from error
