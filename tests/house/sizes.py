"""Nothing grows too large: classes, folders, files, functions."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.house.source import SourceFile, Violation

MOST_METHODS = 15
MOST_MODULES = 15
MOST_LINES = 500
MOST_FUNCTION_LINES = 80


def large_classes(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report classes with more than 15 public methods; properties count, tests do not."""
    for file in files:
        for node in ast.walk(file.tree):
            if file.is_test or not isinstance(node, ast.ClassDef):
                continue
            public = {
                name for item in node.body if (name := _function_name(item)) and not name.startswith("_")
            }
            if len(public) > MOST_METHODS:
                problem = f"class {node.name} has {len(public)} public methods, more than {MOST_METHODS}"
                remedy = "Split it by the reasons to change: one class for each."
                yield Violation(file.path, node.lineno, problem, remedy)


def large_folders(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report folders with more than 15 modules side by side; tests and `__init__` are not counted."""
    modules: dict[str, int] = defaultdict(int)
    for file in files:
        modules[file.folder] += not file.is_test and not file.is_package
    for folder, count in sorted(modules.items()):
        if count > MOST_MODULES:
            problem = f"{count} modules side by side, more than {MOST_MODULES}"
            yield Violation(folder, 1, problem, "Group those that change together into a sub-package.")


def long_files(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report source files of more than 500 lines; a test may be longer, since its table may."""
    for file in files:
        lines = len(file.text.splitlines())
        if lines > MOST_LINES and not file.is_test:
            problem = f"{lines} lines, more than {MOST_LINES}"
            yield Violation(
                file.path, lines, problem, "Move one of the things the file holds into its own file."
            )


def long_functions(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report functions of more than 80 lines, tests included."""
    for file in files:
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                problem = f"function {node.name} has {lines} lines, more than {MOST_FUNCTION_LINES}"
                yield Violation(file.path, node.lineno, problem, "Name its parts and make them functions.")


def _function_name(node: ast.stmt) -> str | None:
    return node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
