"""The files that a source's path names: a file, a folder, a pattern, or a data set written by `save_to_disk`.

Owns their order. Knows nothing of what the files hold, except for the index of a saved data set.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape, glob
from typing import Any, Protocol

from millrace.connectors.storage.faults import retried
from millrace.connectors.storage.files import in_threads
from millrace.connectors.storage.store import Store, split_url
from millrace.core.contracts.rows.prompts import Keys
from millrace.core.contracts.source_path import (
    FORMATS,
    IN_A_FOLDER,
    REMEDY,
    SourcePath,
    is_compressed,
    source_path,
)
from millrace.core.errors import DataError, MissingFileError

SPLITS, STATE = "dataset_dict.json", "state.json"  # written by save_to_disk beside its files


class Located(Keys, Protocol):
    """A data source: its path and the names of its columns."""

    @property
    def path(self) -> str: ...


@dataclass(frozen=True)
class DataFiles:
    """The files of a source in the order of their rows. `one`: the path names this file alone."""

    store: Store
    names: list[str]
    path: SourcePath
    one: bool

    def sizes(self) -> list[int]:
        """Bytes of each file."""

        def size(name: str) -> int:
            return int(self.store.fs.size(f"{self.store.root}/{name}"))

        return in_threads(
            lambda name: retried("read", self.store.url_of(name), partial(size, name)), self.names
        )

    def content(self) -> tuple[int, str, dict[str, str]]:
        """Bytes, SHA-256, and each file's hash by name, empty if the path names a single file.

        The hash of several files is that of their names and hashes.
        """
        return self.together(in_threads(self.hashed, self.names))

    def hashed(self, name: str) -> tuple[int, str]:
        """Bytes and SHA-256 of a file."""
        hashed, size = hashlib.sha256(), 0
        for block in self.store.blocks(name):
            hashed.update(block)
            size += len(block)
        return size, hashed.hexdigest()

    def together(self, found: Sequence[tuple[int, str]]) -> tuple[int, str, dict[str, str]]:
        """Bytes and hashes of all files together, from each file's."""
        size = sum(held for held, _ in found)
        hashes = {name: sha256 for name, (_, sha256) in zip(self.names, found, strict=True)}
        if len(found) == 1:
            return size, found[0][1], {} if self.one else hashes
        listed = "".join(f"{name}\0{sha256}\n" for name, sha256 in hashes.items())
        return size, hashlib.sha256(listed.encode()).hexdigest(), hashes


def where(source: Located) -> str:
    """How an error names a source."""
    return f"source {source.name}: {source.path}"


def located(source: Located, probe: bool = False) -> DataFiles:
    """The files of a source. Raises DataError naming the path if there are none, or they cannot be read.

    probe: a person waits, so storage that does not answer soon is an error.
    """
    try:
        path = source_path(source.path)
    except ValueError as error:
        raise DataError(str(error), where=where(source), remedy=REMEDY) from error
    if path.is_pattern and not _is_file(path.files, probe):
        store, names = _matches(source, path.files, probe)
        if not names:
            raise DataError(
                f"no file that ends in {_any(FORMATS)} matches",
                where=where(source),
                remedy="correct the source's path",
            )
        return DataFiles(store, names, path, one=False)
    if _is_folder(path.files, probe):
        store = Store(path.files.rstrip("/") or "/")
        return DataFiles(store, _in_folder(source, store, probe), path, one=False)
    if not path.files.endswith(FORMATS):
        named = os.path.splitext(path.files)[1]
        raise DataError(
            "unknown format" if named else "no such file or folder",
            where=where(source),
            remedy=f"give a file that ends in {_any(FORMATS)}"
            if named
            else f"correct the source's path; a file ends in {_any(FORMATS)}",
        )
    store, name = split_url(path.files)
    return DataFiles(store, [name], path, one=True)


def is_absent(path: str) -> bool:
    """True if a source's local path does not exist. False for a URL, and for a path that cannot be read."""
    try:
        files = source_path(path).files
    except ValueError:
        return False
    here = os.path.expanduser(files)
    return "://" not in path and not os.path.exists(here) and not glob(here, recursive=True)


def _is_file(path: str, probe: bool) -> bool:
    store, full = _full(path)
    return path.endswith(FORMATS) and bool(retried("look up", path, lambda: store.fs.isfile(full), probe))


def _is_folder(path: str, probe: bool) -> bool:
    store, full = _full(path.rstrip("/"))
    return bool(retried("look up", path, lambda: store.fs.isdir(full), probe))


def _full(path: str) -> tuple[Store, str]:
    """A path's store, and the path in the form of its filesystem."""
    store, name = split_url(path)
    return store, f"{store.root}/{name}" if name else store.root


def _matches(source: Located, path: str, probe: bool) -> tuple[Store, list[str]]:
    """The files that match a pattern, with paths relative to the last folder before the pattern."""
    parts = path.split("/")
    at = next(number for number, part in enumerate(parts) if any(character in part for character in "*?["))
    store, _ = split_url("/".join([*parts[:at], "-"]))
    pattern = "/".join([escape(store.root), *parts[at:]])
    found: dict[str, dict[str, Any]] = _listed(
        path, lambda: store.fs.glob(pattern, detail=True), probe, dict[str, dict[str, Any]]()
    )
    prefix = store.root.strip("/") + "/"
    names = sorted(
        name.strip("/").removeprefix(prefix) for name, item in found.items() if item["type"] != "directory"
    )
    _refuse_compressed(source, names)
    return store, [name for name in names if name.endswith(FORMATS)]


def _in_folder(source: Located, store: Store, probe: bool) -> list[str]:
    items: list[dict[str, Any]] = _listed(
        store.url, lambda: store.fs.ls(store.root, detail=True), probe, list[dict[str, Any]]()
    )
    names = sorted(
        item["name"].rstrip("/").rpartition("/")[2] for item in items if item["type"] != "directory"
    )
    if SPLITS in names:
        splits = _index(source, store, SPLITS)["splits"]
        raise DataError(
            f"a saved data set with the splits {', '.join(splits)}",
            where=where(source),
            remedy=f"name one: {source_path(source.path).files.rstrip('/')}/{splits[0]}",
        )
    if STATE in names and any(name.endswith(".arrow") for name in names):
        return [item["filename"] for item in _index(source, store, STATE)["_data_files"]]
    names = [name for name in names if not name.startswith((".", "_"))]
    _refuse_compressed(source, names)
    files = [name for name in names if name.endswith(IN_A_FOLDER)]
    if not files:
        raise DataError(
            f"the folder holds no file that ends in {_any(IN_A_FOLDER)}",
            where=where(source),
            remedy="name the folder with the files, or a pattern such as data/**/*.jsonl",
        )
    return files


def _refuse_compressed(source: Located, names: Sequence[str]) -> None:
    """Raise DataError if a file would be skipped because it is compressed."""
    compressed = next(filter(is_compressed, names), None)
    if compressed:
        raise DataError(
            f"{compressed} is compressed, and compressed files are not read",
            where=where(source),
            remedy="unpack it; or leave it out by a pattern such as data/*.jsonl",
        )


def _index(source: Located, store: Store, name: str) -> dict[str, Any]:
    """The index of a data set's files or splits, written by save_to_disk."""
    key = "splits" if name == SPLITS else "_data_files"
    try:
        found = json.loads(store.read(name))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"its {name} is not JSON: {error}", where=where(source), remedy="save the data set again"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get(key), list) or not found[key]:
        raise DataError(f"its {name} lists no {key}", where=where(source), remedy="save the data set again")
    return found


def _listed(path: str, call: Callable[[], Any], probe: bool, none: Any) -> Any:
    try:
        return retried("list", path, call, probe)
    except MissingFileError:
        return none


def _any(endings: tuple[str, ...]) -> str:
    return " or ".join(endings)
