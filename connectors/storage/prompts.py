"""Data sources: files of prompts at any fsspec URL, read block by block and row by row.

A row that cannot be used is quarantined with the reason. A source that cannot be read at all is an error.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from millrace.connectors.storage.faults import retried
from millrace.connectors.storage.sources.formats import Item, count_rows, line_of, lines, rows_of
from millrace.connectors.storage.sources.locate import DataFiles, Located, located, where
from millrace.connectors.storage.sources.unpacked import LARGEST_ROW
from millrace.core.contracts.rows.prompts import (
    PromptRow,
    Quarantined,
    SourceFingerprint,
    require_labels,
)
from millrace.core.errors import DataError, MissingFileError
from millrace.core.waits import beat


def read_source(source: Located) -> tuple[list[PromptRow], list[Quarantined]]:
    """The usable rows of a source, and the quarantined ones with their reasons, both in the order of the files.

    Raises DataError naming the file if it is missing, of an unknown format or a broken Parquet file.
    """
    files = located(source)

    def items() -> Iterator[Item]:
        return _sliced(rows_of(source, files), files, lambda: sum(_counts(source, files)[0]))

    rows, quarantined = _separate(source, items)
    rows, unlabelled = require_labels(rows, source)
    return rows, sorted(quarantined + unlabelled, key=lambda item: item.row)


COUNTED = 8 << 20  # bytes of a file whose lines are counted, not estimated


class FirstRows(NamedTuple):
    """The first rows of a source. `total`: the number of all rows, possibly estimated; `whole`: these are all rows."""

    usable: list[PromptRow]
    refused: list[Quarantined]
    total: int
    whole: bool


def first_rows(source: Located, count: int, size: int) -> FirstRows:
    """The first rows of a source, at most `count` and about `size` bytes, for a check before anything starts.

    Raises as `read_source` does, and StorageError if the storage does not answer soon.
    """
    files = located(source, probe=True)
    total, exact = 0, True

    def head() -> list[Item]:
        nonlocal total, exact
        if files.one and files.path.whole and files.names[0].endswith((".jsonl", ".json")):
            total, exact, items = _first_lines(source, files, count, size)
            return items
        counts, exact = _counts(source, files, size)
        total = len(files.path.rows_of(sum(counts)))
        wanted = _sliced(rows_of(source, files, head=True), files, lambda: sum(counts))
        return list(_until(islice(wanted, count), size))

    url = files.store.url_of(files.names[0])
    rows, refused = _separate(source, lambda: retried("read", url, head, probe=True))
    whole = exact and len(rows) + len(refused) == total
    if whole:
        rows, unlabelled = require_labels(rows, source)
        refused = sorted(refused + unlabelled, key=lambda item: item.row)
    return FirstRows(rows, refused, total, whole)


def _first_lines(source: Located, files: DataFiles, count: int, size: int) -> tuple[int, bool, list[Item]]:
    """The number of lines of a file, whether it is exact, and the first lines."""
    path = f"{files.store.root}/{files.names[0]}"
    held = files.store.fs.size(path)
    data: bytes = files.store.fs.cat_file(path, start=0, end=min(held, size)) if held else b""
    while len(data) < min(held, LARGEST_ROW + 1) and b"\n" not in data:  # a larger row is still read whole
        data += files.store.fs.cat_file(path, start=len(data), end=min(held, 2 * len(data)))
    found = list(lines([data]))
    if len(data) < held and len(found) > 1:
        found = found[:-1]  # the last line may be cut
    total = round(len(found) * held / max(1, len(data)))
    return (
        total,
        len(data) == held,
        [line_of(line, number, source) for number, line in enumerate(found[:count])],
    )


def _counts(source: Located, files: DataFiles, most: int | None = None) -> tuple[list[int], bool]:
    """The number of rows of each file, and whether all are exact. most: lines of larger files are estimated."""
    sizes = files.sizes()
    found = [
        count_rows(source, files, number, size, size if most is None else most)
        for number, size in enumerate(sizes)
    ]
    return [rows for rows, _ in found], all(exact for _, exact in found)


def _sliced(items: Iterator[Item], files: DataFiles, total: Callable[[], int]) -> Iterator[Item]:
    """The items of the slice. `total` is called only if a bound counts from the end."""
    first, last = files.path.first, files.path.last
    if files.path.from_the_end:
        found = files.path.rows_of(total())
        first, last = found.start, max(found.start, found.stop)
    return islice(items, first, last)


def _until(rows: Iterable[PromptRow | Quarantined], size: int) -> Iterator[PromptRow | Quarantined]:
    """The first rows, up to about `size` characters of prompts."""
    for row in rows:
        yield row
        size -= len(str(row.prompt)) if isinstance(row, PromptRow) else 0
        if size <= 0:
            return


def _separate(
    source: Located, items: Callable[[], Iterable[PromptRow | Quarantined]]
) -> tuple[list[PromptRow], list[Quarantined]]:
    rows: list[PromptRow] = []
    quarantined: list[Quarantined] = []
    try:
        for item in items():
            beat()
            if isinstance(item, PromptRow):
                rows.append(item)
            else:
                quarantined.append(item)
    except MissingFileError as error:
        raise DataError("no such file", where=where(source), remedy="correct the source's path") from error
    return rows, quarantined


def fingerprint(
    source: Located, usable: Iterable[PromptRow], quarantined: Iterable[Quarantined]
) -> SourceFingerprint:
    """Size, hash and row counts of a source whose rows have been read."""
    size, sha256, files = located(source).content()
    good = list(usable)
    rows = len(good) + sum(1 for _ in quarantined)
    return SourceFingerprint.of(source.path, size, sha256, rows, good, files)


def about_rows(source: Located) -> int:
    """About how many rows a source has. Raises DataError naming the path if it cannot be read."""
    files = located(source)
    return len(files.path.rows_of(sum(_counts(source, files, COUNTED)[0])))


def size_and_hash(source: Located, most: int) -> tuple[int, str]:
    """Size and hash of a source, as in its fingerprint; the hash is empty if it holds more than `most` bytes.

    Raises DataError or StorageError if it cannot be read.
    """
    files = located(source, probe=True)
    size = sum(files.sizes())
    return size, files.content()[1] if size <= most else ""
