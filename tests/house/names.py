"""Test files and public classes have different names: pytest imports by file name, and readers search by name."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.house.source import SourceFile, Violation

PRODUCT = ("core/", "connectors/", "tasks/", "flows/", "src/")


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


def equal_class_names(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report public classes of the product that share a name with one in another file."""
    first: dict[str, str] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.is_test or not file.path.startswith(PRODUCT):
            continue
        for node in file.tree.body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            other = first.setdefault(node.name, file.path)
            if other != file.path:
                remedy = "Name what it is there: a layer or a subject before the noun tells them apart."
                yield Violation(file.path, node.lineno, f"class {node.name} is also in {other}", remedy)
