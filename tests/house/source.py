"""Source files as the rules see them: path, dotted name, syntax tree, and the violations that rules report."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "millrace"
ROOM_FOLDERS = ("flows", "tasks", "connectors", "core", "deployments")  # imported as millrace.NAME
OTHER_FOLDERS = ("src", "benchmarks", "examples")
TEST_FOLDER = "tests"


@dataclass(frozen=True, order=True)
class Violation:
    """One place that breaks a rule, and what to do about it."""

    path: str
    line: int
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}\n    {self.remedy}"


@dataclass(frozen=True)
class SourceFile:
    """One Python file."""

    path: str  # from the repository's root, with slashes
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree. Most rules need those of a few folders, and parsing all takes seconds."""
        return ast.parse(self.text, filename=self.path)

    @property
    def module(self) -> str:
        """The dotted name under which the file is imported: core/accounts/ledger.py is millrace.core.accounts.ledger."""
        parts = self.path.removesuffix(".py").split("/")
        if parts[0] == "src":
            parts = parts[1:]
        elif parts[0] in ROOM_FOLDERS:
            parts = [PACKAGE, *parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_package(self) -> bool:
        """Whether the file is the `__init__` of a package."""
        return self.path.endswith("__init__.py")

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to the tests."""
        return self.path.split("/")[0] == TEST_FOLDER

    @property
    def folder(self) -> str:
        """The folder that holds the file."""
        return self.path.rpartition("/")[0]


def read_source(root: Path) -> Iterator[SourceFile]:
    """All Python files of a checkout; links (src/millrace holds some) are not followed."""
    for folder in (*ROOM_FOLDERS, *OTHER_FOLDERS, TEST_FOLDER):
        for path in sorted((root / folder).rglob("*.py")):
            inside = path.relative_to(root)
            if (
                any((root / parent).is_symlink() for parent in inside.parents)
                or "__pycache__" in inside.parts
            ):
                continue
            yield SourceFile(inside.as_posix(), path.read_text())
