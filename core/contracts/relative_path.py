"""Paths of files in records: below a folder that the reader knows, and nowhere else. Pure."""

from __future__ import annotations


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
