"""The path of a data source: its files, and which of their rows; and paths of files in records. Pure.

Owns the slice at a path's end and what makes it a pattern, and that a record's path stays below the folder that its reader knows.
Knows nothing of files.
"""

import re
from typing import NamedTuple

FORMATS = (".jsonl", ".json", ".parquet", ".arrow")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
UNREAD = (".csv", ".tsv", ".txt", ".xlsx", ".tar", *COMPRESSED)
IN_A_FOLDER = (".jsonl", ".parquet")
SLICE = re.compile(r"(.+)@\[([^\[\]]*)\]$", re.DOTALL)
BOUND = re.compile(r"-?\d+")
REMEDY = "write path@[first:last]: whole numbers, either may be missing, negative ones count from the end"


class SourcePath(NamedTuple):
    """A path without its slice, and the slice, as Python's lists take it."""

    files: str
    first: int | None = None
    last: int | None = None

    @property
    def whole(self) -> bool:
        """Whether the slice has all rows."""
        return self.first is None and self.last is None

    @property
    def from_the_end(self) -> bool:
        """Whether the number of rows must be known to find the slice."""
        return any(bound is not None and bound < 0 for bound in (self.first, self.last))

    @property
    def is_pattern(self) -> bool:
        """Whether it may name several files, as data/*.jsonl does."""
        return any(character in self.files for character in "*?[")

    def rows_of(self, total: int) -> range:
        """Numbers of the rows in the slice, of `total` rows."""
        return range(total)[self.first : self.last]


def is_compressed(name: str) -> bool:
    """Whether a file is a compressed file of prompts."""
    return any(name.endswith(f"{form}{ending}") for form in FORMATS for ending in COMPRESSED)


def source_path(path: str) -> SourcePath:
    """Read a path. Raises ValueError if it ends in an invalid slice."""
    match = SLICE.fullmatch(path)
    if match is None:
        return SourcePath(path)
    first, colon, last = (part.strip() for part in match[2].partition(":"))
    if not colon or not all(not bound or BOUND.fullmatch(bound) for bound in (first, last)):
        raise ValueError(f"@[{match[2]}] is no slice")
    return SourcePath(match[1], int(first) if first else None, int(last) if last else None)


def inside(path: str) -> str:
    """The path of a file below a folder, as records have it: its parts with slashes between.

    Raises ValueError for a path that is absolute, leaves the folder, or is no plain path.
    """
    if path.startswith("/") or "\\" in path or "\0" in path or not all(map(_is_name, path.split("/"))):
        raise ValueError(f"{path!r} is no path of a file below its folder")
    return path


def leaves(path: str) -> bool:
    """Whether a path goes up: out of its base folder, or out of a folder on the way."""
    return ".." in path.split("/") or "\0" in path


def _is_name(part: str) -> bool:
    return part not in ("", ".", "..")
