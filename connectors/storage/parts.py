"""Parts: tables appended to a folder under names of their own, whole or not there."""

from __future__ import annotations

import logging
import uuid

import pyarrow as pa

from connectors.storage.store import FileEntry, Store
from core import schema
from core.errors import CorruptFileError

log = logging.getLogger(__name__)


def write_part(store: Store, folder: str, table: pa.Table, kind: str) -> FileEntry:
    """Append a part."""
    return store.write_table(f"{folder}/part-{uuid.uuid4().hex}.parquet", table, kind)


def list_parts(store: Store, folder: str) -> list[str]:
    """Paths of all parts of a folder."""
    return [path for path in store.list(folder) if path.rsplit("/", 1)[-1].startswith("part-")]


def read_parts(
    store: Store, folder: str, kind: str, *, columns: list[str] | None = None, ignore_incomplete: bool = False
) -> pa.Table:
    """All rows of a folder's parts. A broken part raises CorruptFileError, or is removed with a log line if told so."""
    found: list[pa.Table] = []
    for path in list_parts(store, folder):
        try:
            found.append(store.read_table(path, kind, columns=columns))
        except CorruptFileError as error:
            if not ignore_incomplete:
                raise
            log.warning("removing a broken part: %s", error)
            store.remove(path)
    wanted = schema.schema(kind)
    empty = wanted.empty_table()
    return pa.concat_tables(
        [table.replace_schema_metadata(wanted.metadata) for table in found]
        or [empty.select(columns) if columns else empty]
    )
