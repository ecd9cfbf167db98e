"""Parts: tables appended to a folder, each a file with a unique name, written atomically.

Names are never reused, so a task that starts again adds parts and overwrites none. A name contains the token of the driver that
wrote it, for a shard the number of its attempt, and the first digits of the content's hash. By these digits a part can be
verified before a manifest names it.

Two kinds of notes say which parts count. A driver that takes over an open iteration records the parts that it found: parts of
earlier drivers that appear later do not count, since their samples are generated again. A driver that replaces an attempt of a
shard records which parts of the attempt count. A driver that takes over looks up earlier notes by name: a listing may lack them.
"""

import hashlib
import logging
import re
import uuid
from collections.abc import Mapping, Sequence, Set
from functools import partial
from types import MappingProxyType

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from millrace.connectors.storage import tables
from millrace.connectors.storage.conditional import RUN
from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError, MissingFileError

log = logging.getLogger(__name__)

PART_FOLDERS = ("rollouts", "turns", "rewards", "evaluations")  # of an iteration
# the token of the driver that wrote it, the attempt if a shard wrote it, and the first digits of its hash
PART = re.compile(r"part-(\d{6,})-(?:(\d{4,})-)?[0-9a-f]{32}\.([0-9a-f]{16})\.parquet")
TAKEOVER = re.compile(r"^takeover-(\d{6,})\.json$")
REPLACED = re.compile(r"^replaced-(\d{6,})-(\d{4,})\.json$")


class _Counting(BaseModel):
    """A note: names of the parts that count, by folder, at a takeover or of one attempt of a shard."""

    model_config = ConfigDict(extra="forbid")

    parts: dict[str, list[str]]


def write_part(store: Store, folder: str, table: pa.Table, kind: str) -> FileEntry:
    """Append a part to a folder."""
    data = tables.encode(table, kind)
    token = store.fence.token if store.fence else 0
    attempt = f"{store.attempt:04d}-" if store.attempt else ""
    name = f"part-{token:06d}-{attempt}{uuid.uuid4().hex}.{hashlib.sha256(data).hexdigest()[:16]}.parquet"
    entry = store.write(f"{folder}/{name}", data, unique=True)
    return entry.model_copy(update={"rows": table.num_rows, "table": kind})


def take_over_parts(
    store: Store,
    folders: Sequence[str],
    token: int,
    run: str | None = None,
    recorded: Mapping[str, Set[str]] = MappingProxyType({}),
) -> None:
    """Record the parts that count now. Parts of drivers before `token` that appear later do not count. run: the run's id.

    recorded: paths that committed records name, by folder: a listing may lack them. Scores count only if their samples do.
    """
    paths = _with_unlisted_notes(store, store.list(), token)
    parts = {
        folder: sorted({*_counting(store, folder, paths), *recorded.get(folder, ())}) for folder in folders
    }
    if not store.local and {"rollouts", "rewards"} <= {*folders} and not recorded.get("rewards"):
        parts["rewards"] = _of_samples(store, parts["rewards"], parts["rollouts"])
    _note(store, f"takeover-{token:06d}.json", parts, run)


def replace_attempt(
    store: Store, token: int, attempt: int, parts: Mapping[str, Sequence[str]], run: str | None = None
) -> None:
    """Record which parts of a shard's attempt count, before the next attempt starts. parts: paths by folder, of any attempts."""
    own = {
        folder: [path for path in paths if _writer(path.removeprefix(f"{folder}/")) == (token, attempt)]
        for folder, paths in parts.items()
    }
    _note(store, f"replaced-{token:06d}-{attempt:04d}.json", own, run)


def list_parts(store: Store, folder: str) -> list[str]:
    """Paths of a folder's parts that count, sorted. If parts have equal content, which means a copied file, the first counts.

    Raises CorruptFileError if the note of the newest takeover, or of a replaced attempt, is broken.
    """
    return _counting(store, folder, store.list())


def _counting(store: Store, folder: str, paths: Sequence[str]) -> list[str]:
    """The parts of a folder that count. paths: all existing parts and notes."""
    names = [path.removeprefix(f"{folder}/") for path in paths if path.startswith(f"{folder}/")]
    parts = {name for name in names if PART.fullmatch(name)}
    for path in paths:
        if match := REPLACED.match(path):
            noted = _noted(store, path, folder)
            of_attempt = {name for name in parts if _writer(name) == (int(match[1]), int(match[2]))}
            parts = (parts - of_attempt) | (of_attempt & noted) | _unlisted(store, folder, noted - parts)
    takeovers = {int(match[1]): path for path in paths if (match := TAKEOVER.match(path))}
    if takeovers:
        newest = max(takeovers)
        noted = _noted(store, takeovers[newest], folder)
        parts = {name for name in parts if name in noted or _writer(name)[0] >= newest}
        parts |= _unlisted(store, folder, noted - parts)
    found: dict[str, str] = {}
    for name in sorted(parts):
        content = name.split(".", 1)[1]
        if found.setdefault(content, name) != name:
            log.warning("%s: a copy of %s, which counts", store.url_of(f"{folder}/{name}"), found[content])
    return [f"{folder}/{name}" for name in found.values()]


def _with_unlisted_notes(store: Store, paths: list[str], token: int) -> list[str]:
    """The listed paths, and the notes of drivers before `token` that an object store's listing lacks."""
    if store.local:
        return paths
    attempts = {_writer(path.rsplit("/", 1)[-1]) for path in paths if "/" in path}
    notes = [f"takeover-{each:06d}.json" for each in range(2, token)]
    notes += [f"replaced-{each:06d}-{attempt:04d}.json" for each, attempt in attempts if attempt]
    return sorted({*paths, *store.existing(note for note in notes if note not in paths)})


def _of_samples(store: Store, rewards: list[str], rollouts: list[str]) -> list[str]:
    """The parts of scores whose samples are all in these rollouts. A sample without its part is generated and scored again."""
    made = {sid for ids in in_threads(partial(_sample_ids, store), rollouts) for sid in ids}
    scored = in_threads(partial(_sample_ids, store), rewards)
    return [path for path, ids in zip(rewards, scored, strict=True) if made.issuperset(ids)]


def _sample_ids(store: Store, path: str) -> list[str]:
    """The samples of a part. Empty if the part is broken, which its reader reports or removes, or if it no longer exists."""
    try:
        ids: list[str] = store.read_table(path, columns=["sample_id"]).column("sample_id").to_pylist()
    except (CorruptFileError, MissingFileError):
        return []
    return ids


def _unlisted(store: Store, folder: str, names: set[str]) -> set[str]:
    """The noted parts that exist although an object store's listing lacks them."""
    if store.local:
        return set()
    there = store.existing(f"{folder}/{name}" for name in sorted(names))
    return {path.removeprefix(f"{folder}/") for path in there}


def list_notes(store: Store) -> list[str]:
    """Paths of the notes in an iteration's folder that say which parts count."""
    return [path for path in store.list() if TAKEOVER.match(path) or REPLACED.match(path)]


def check_note(store: Store, path: str) -> object:
    """The id of the run that a note names, if any. Raises CorruptFileError if the note changed since it was written."""
    _read_note(store, path)
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
    """All rows of a folder's parts, in the order of their paths. With entries, only of the parts that they name, each checked.

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


def _writer(name: str) -> tuple[int, int]:
    """Token of the driver that wrote a part, and attempt of the shard or 0. Two zeros if the name is not a part's."""
    match = PART.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def _note(store: Store, name: str, parts: Mapping[str, Sequence[str]], run: str | None) -> None:
    names = {folder: [path.removeprefix(f"{folder}/") for path in paths] for folder, paths in parts.items()}
    iteration = "/".join(store.url.split("/")[-2:])
    store.write_sealed(name, _Counting(parts=names).model_dump(), place=f"{iteration}/{name}", run=run)


def _noted(store: Store, path: str, folder: str) -> set[str]:
    return set(_read_note(store, path).parts.get(folder, []))


def _read_note(store: Store, path: str) -> _Counting:
    try:
        return _Counting.model_validate(store.read_sealed(path))
    except (ValidationError, CorruptFileError) as error:
        raise CorruptFileError(
            "does not say which parts count",
            where=store.url_of(path),
            remedy="restore it, or remove it: then all parts count",
        ) from error
