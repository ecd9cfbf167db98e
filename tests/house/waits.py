"""Every wait in the source: what it is, and whether a deadline stands beside it.

Finds what may wait for something else: awaited futures, locks, conditions, queues, events, threads, processes, pipes, sockets,
actors, barriers and loops that sleep. A wait needs no row where it passes through `progressing`, has a timeout of its own, or
stands inside `asyncio.timeout`. tests/house/test_waits.py has a row for each of the others, which says what bounds it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.house.source import ROOM_FOLDERS, SourceFile

PRIMITIVES = {"progressing", "while_moving"}
TIMEOUTS = {"timeout", "timeout_at"}  # of asyncio
WAITS = {"wait", "wait_for", "acquire", "communicate", "recv", "recv_bytes", "readline", "readexactly"}
CALLS = {"barrier", "urlopen", "check_output", "check_call", "flock", "remote"}
POLLS = {"sleep"}
LOCKS = ("lock", "turn", "ready", "places", "polling", "settling", "checking", "joining", "starting", "free", "limit", "changed", "moved", "wake", "calls", "rollouts", "closing")  # fmt: skip


@dataclass(frozen=True, order=True)
class Wait:
    """One place that waits."""

    path: str
    what: str  # as the source has it
    line: int


def waits(files: Iterable[SourceFile]) -> Iterator[Wait]:
    """Every wait of these files that has no deadline beside it."""
    for file in files:
        if file.path.split("/")[0] in ROOM_FOLDERS:
            finder = _Finder(file.path)
            finder.visit(file.tree)
            yield from finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str) -> None:
        self.found: list[Wait] = []
        self._path = path
        self._loops = 0
        self._bounded = 0

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in PRIMITIVES:
            self._inside(node)
            return
        if self._waits(node, name) and not _has_timeout(node):
            self._add(node, ast.unparse(node.func))
        self.generic_visit(node)

    def _waits(self, node: ast.Call, name: str) -> bool:
        awaits_nothing = not node.args and not node.keywords
        return (
            name in WAITS
            or name in CALLS
            or (name == "join" and (awaits_nothing or _of_threads(node)))
            or (name in POLLS and self._loops > 0 and ast.unparse(node.func) != "self.sleep")
            or ast.unparse(node.func) in ("ray.get", "ray.wait", "subprocess.run")
        )

    def visit_Await(self, node: ast.Await) -> None:
        if isinstance(node.value, ast.Name | ast.Attribute):
            self._add(node, f"await {ast.unparse(node.value)}")
        elif isinstance(node.value, ast.Call) and _name(node.value.func) == "get" and not node.value.args:
            self._add(node, ast.unparse(node.value.func))
        elif isinstance(node.value, ast.Call) and _name(node.value.func) == "shield":
            self._add(node, ast.unparse(node.value))
        self.generic_visit(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self._with(node)

    def visit_With(self, node: ast.With) -> None:
        self._with(node)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        bounded = False
        for item in node.items:
            entered = item.context_expr
            if isinstance(entered, ast.Call) and _name(entered.func) in TIMEOUTS:
                bounded = True
            elif isinstance(entered, ast.Name | ast.Attribute) and _name(entered).strip("_").endswith(LOCKS):
                word = "async with" if isinstance(node, ast.AsyncWith) else "with"
                self._add(node, f"{word} {ast.unparse(entered)}")
        if bounded:
            self._inside(node)
        else:
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._loop(node)

    def visit_For(self, node: ast.For) -> None:
        self._loop(node)

    def _loop(self, node: ast.AST) -> None:
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    def _inside(self, node: ast.AST) -> None:
        self._bounded += 1
        self.generic_visit(node)
        self._bounded -= 1

    def _add(self, node: ast.expr | ast.stmt, what: str) -> None:
        if not self._bounded:
            self.found.append(Wait(self._path, what, node.lineno))


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _has_timeout(node: ast.Call) -> bool:
    return any(
        keyword.arg in ("timeout", "timeout_s")
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
        for keyword in node.keywords
    )


def _of_threads(node: ast.Call) -> bool:
    """`thread.join(3)`: a text's `join` takes what it joins, which is no number."""
    return len(node.args) == 1 and (
        (isinstance(node.args[0], ast.Constant) and not isinstance(node.args[0].value, str))
        or ast.unparse(node.args[0]).endswith("_S")
    )
