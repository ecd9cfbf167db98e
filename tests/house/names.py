"""Test files have names of their own: pytest imports the modules of plain folders by file name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.house.source import SourceFile, Violation


def equal_test_names(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report test files that share a name; those of a package have its name before theirs."""
    files = list(files)
    packages = {file.folder for file in files if file.is_package}
    first: dict[str, str] = {}
    for file in sorted(files, key=lambda file: file.path):
        name = file.path.rpartition("/")[2]
        if not file.is_test or file.folder in packages or not name.startswith("test_"):
            continue
        other = first.setdefault(name, file.path)
        if other != file.path:
            remedy = "Name it after what it tests: pytest stops when it collects two modules of one name."
            yield Violation(file.path, 1, f"named like {other}", remedy)
