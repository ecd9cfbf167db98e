"""Parts: tables appended to a folder, each a file with a unique name, written atomically.

Names are never reused, so a task that starts again adds parts and overwrites none. A name contains the first digits of the
content's hash, so that a part can be verified before a manifest names it.
"""

from __future__ import annotations

import hashlib
import logging
import uuid

import pyarrow as pa

from millrace.connectors.storage import tables
from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError

log = logging.getLogger(__name__)


def write_part(store: Store, folder: str, table: pa.Table, kind: str) -> FileEntry:
    """Append a part."""
    data = tables.encode(table, kind)
    name = f"part-{uuid.uuid4().hex}.{hashlib.sha256(data).hexdigest()[:16]}.parquet"
    entry = store.write(f"{folder}/{name}", data)
    return entry.model_copy(update={"rows": table.num_rows, "table": kind})


def list_parts(store: Store, folder: str) -> list[str]:
    """Paths of all parts of a folder, sorted."""
    names = [path.rsplit("/", 1)[-1] for path in store.list(folder)]
    return [f"{folder}/{name}" for name in names if name.startswith("part-") and name.endswith(".parquet")]


def read_parts(
    store: Store, folder: str, kind: str, *, columns: list[str] | None = None, ignore_incomplete: bool = False
) -> pa.Table:
    """All rows of a folder's parts, in the order of their paths.

    A broken part raises CorruptFileError; with `ignore_incomplete` it is removed with a log line.
    """

    def read(path: str) -> pa.Table | None:
        try:
            return store.read_table(path, kind, columns=columns)
        except CorruptFileError as error:
            if not ignore_incomplete:
                raise
            log.warning("removing a broken part: %s", error)
            store.remove(path)
            return None

    empty = schema.schema(kind).empty_table()
    tables_read = [table for table in in_threads(read, list_parts(store, folder)) if table is not None]
    return pa.concat_tables([empty.select(columns) if columns else empty, *tables_read])
