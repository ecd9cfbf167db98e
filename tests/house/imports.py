"""Who imports whom: no cycle between modules, no connector that imports another."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.house.source import PACKAGE, SourceFile, Violation

CONNECTORS = f"{PACKAGE}.connectors"
SHARED = (
    ("host", "http"),
    ("storage",),
)  # connectors that others may import; a later one may import an earlier one
CYCLE_REMEDY = "Move what they share into a module that imports neither, or pass it as an argument."
CONNECTOR_REMEDY = (
    "Put the shared type or function into core, or let tasks/runtime pass what one makes to the other."
)


@dataclass(frozen=True)
class Import:
    """One imported module, and the line that imports it."""

    target: str
    line: int


def import_cycles(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report each group of modules that import each other in a circle: inside functions and under TYPE_CHECKING too."""
    by_name = {file.module: file for file in files}
    graph = {
        name: {found.target: found.line for found in imports_of(file, set(by_name))}
        for name, file in by_name.items()
    }
    for circle in _circles({name: set(targets) for name, targets in graph.items()}):
        first = min(circle)
        line = min(line for target, line in graph[first].items() if target in circle)
        shown = " -> ".join(_way_around(graph, circle, first))
        yield Violation(by_name[first].path, line, f"import cycle: {shown}", CYCLE_REMEDY)


def connector_imports(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report modules of a connector that import another connector, for types and inside functions too."""
    files = list(files)
    names = {file.module for file in files}
    for file in files:
        own = _connector(file.module)
        if own is None:
            continue
        for found in imports_of(file, names):
            other = _connector(found.target)
            if other is not None and other != own and _floor(other) >= _floor(own):
                problem = f"connectors/{own} imports connectors/{other} ({found.target})"
                yield Violation(file.path, found.line, problem, CONNECTOR_REMEDY)


def imports_of(file: SourceFile, names: set[str]) -> Iterator[Import]:
    """All imports of the project's modules in a file, wherever they stand in it."""
    for node in ast.walk(file.tree):
        for target in _targets(file, node, names):
            if target != file.module:
                yield Import(target, node.lineno)  # type: ignore[attr-defined]


def _targets(file: SourceFile, node: ast.AST, names: set[str]) -> Iterator[str]:
    """The modules that one statement or call imports."""
    if isinstance(node, ast.Import):
        yield from (item.name for item in node.names if item.name in names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(file, node)
        for item in node.names:
            dotted = f"{base}.{item.name}"
            if dotted in names:
                yield dotted
            elif base in names:
                yield base
    elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("import_module"):
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and argument.value in names:
            yield str(argument.value)


def _absolute(file: SourceFile, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = file.module.split(".")
    parts = parts[: len(parts) - node.level + (1 if file.is_package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _connector(module: str) -> str | None:
    """The connector a module belongs to."""
    return (
        module.removeprefix(f"{CONNECTORS}.").split(".")[0] if module.startswith(f"{CONNECTORS}.") else None
    )


def _floor(connector: str) -> int:
    """0 for what all connectors may import."""
    return next((floor for floor, names in enumerate(SHARED) if connector in names), len(SHARED))


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that reach each other: strongly connected components of two or more."""
    reach = {name: _reachable(graph, name) for name in graph}
    circles: list[set[str]] = []
    for name in sorted(graph):
        if name in reach[name] and not any(name in circle for circle in circles):
            circles.append({other for other in reach[name] if name in reach[other]})
    return circles


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(graph[name])
    return seen


def _way_around(graph: dict[str, dict[str, int]], circle: set[str], first: str) -> list[str]:
    """The shortest way from a module back to itself."""
    ways = [[first]]
    seen: set[str] = set()
    while True:
        way = ways.pop(0)
        for target in sorted(set(graph[way[-1]]) & circle):
            if target == first:
                return [*way, first]
            if target not in seen:
                seen.add(target)
                ways.append([*way, target])
