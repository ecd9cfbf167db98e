"""No method is called by a string: definition and call would be connected by a text search only."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.house.source import SourceFile, Violation

CALLERS = {"call", "call_all", "collective_rpc", "execute_method", "invoke", "methodcaller", "rpc"}
REMEDY = "Declare the method in the part's Protocol, as connectors/trainers/rank.py does, and call it: `actor.call(Rank.train, ...)`."


def string_calls(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report `actor.call("train", ...)`, `getattr(actor, name)(...)` and `getattr(actor, name).remote(...)`."""
    for file in files:
        if file.is_test:
            continue
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and (shown := _shown(node)):
                yield Violation(file.path, node.lineno, f"{shown} calls a method by a string", REMEDY)


def _shown(node: ast.Call) -> str | None:
    """The call as a message shows it, if it names its method by a string."""
    name = _last_name(node.func)
    if name.lstrip("_") in CALLERS and node.args and _is_text(node.args[0]):
        return f"{name}({ast.unparse(node.args[0])}, ...)"
    target = node.func
    if name == "remote":  # Ray's call: getattr(...).remote(...), getattr(...).options(...).remote(...)
        target = _start_of_chain(target)
    if isinstance(target, ast.Call) and _last_name(target.func) == "getattr":
        return f"{ast.unparse(target)}(...)"
    return None


def _start_of_chain(target: ast.expr) -> ast.expr:
    """What `a` is in `a.options(...).remote`; a call of getattr is where a chain starts."""
    while isinstance(target, ast.Attribute) or (
        isinstance(target, ast.Call) and _last_name(target.func) != "getattr"
    ):
        target = target.value if isinstance(target, ast.Attribute) else target.func
    return target


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_text(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_text(value.body) or _is_text(value.orelse)
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str)
    )
