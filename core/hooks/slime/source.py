"""Finds what the source of a hook for slime reads: names of slime's, attributes of args, and tokens of samples. Pure.

A missing name within a function fails only when the function runs. Found here, it is refused before a run. Counted are
functions that the hook reaches by name, and each module's code outside of functions.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.core.hooks.slime.names import PACKAGES

ARGS = "args"
ASKS = ("hasattr", "getattr", "setattr")
TOKENS = ("tokens", "loss_mask", "rollout_log_probs")  # attributes of a sample
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class HookReads:
    """What a hook reads: each name with its file and line."""

    names: dict[str, str] = field(default_factory=dict)  # dotted names of slime's
    arguments: dict[str, str] = field(default_factory=dict)  # attributes of args
    tokens: dict[str, str] = field(default_factory=dict)  # attributes of the samples that it gets
    removes: str | None = None  # the line that sets remove_sample


def reads_of(function: Callable[..., Any], module: ModuleType) -> HookReads:
    """What a function or class reads, in its module and in the modules of its folder that it imports."""
    trees = list(_trees(module))
    defined: dict[str, list[tuple[Path, ast.AST]]] = {}
    for path, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                defined.setdefault(node.name, []).append((path, node))
    reached = list(_reached(function.__name__, defined))
    found = HookReads()
    for path, tree in trees:
        within = (each for where, node in reached if where == path for each in ast.walk(node))
        _add(found.names, path, _slime_names([*_outside(tree), *within]))
    bodies = [(path, node) for path, node in reached if isinstance(node, FUNCTIONS)]
    known = {name for _, node in bodies for name in _given(node)}
    for path, node in bodies:
        read = _attributes(node, {ARGS})
        _add(found.arguments, path, {name: line for name, line in read.items() if not {name, "*"} & known})
    for path, node in defined.get(function.__name__, ()):
        if isinstance(node, FUNCTIONS) and len(node.args.args) > 1:
            read = _attributes(node, _samples(node))
            found.removes = next((f"{path.name}, line {line}" for line in _removals(node)), None)
            _add(found.tokens, path, {name: line for name, line in read.items() if name in TOKENS})
    return found


def _add(found: dict[str, str], path: Path, read: dict[str, int]) -> None:
    for name, line in read.items():
        found.setdefault(name, f"{path.name}, line {line}")


def _trees(module: ModuleType) -> Iterator[tuple[Path, ast.Module]]:
    """The parsed files of a module and of the modules that it imports from its folder or below."""
    seen: set[str] = set()
    left, own = [module], _file(module)
    while left:
        each = left.pop()
        path = _file(each)
        if each.__name__ in seen or path is None or own is None or not path.is_relative_to(own.parent):
            continue
        seen.add(each.__name__)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield path, tree
        left += [sys.modules[name] for name in _imports(tree, each) if name in sys.modules]


def _reached(name: str, defined: dict[str, list[tuple[Path, ast.AST]]]) -> Iterator[tuple[Path, ast.AST]]:
    """The function or class of this name, then the functions and classes that it uses by name."""
    seen, left = set[str](), [name]
    while left:
        each = left.pop()
        if each in seen or each not in defined:
            continue
        seen.add(each)
        for path, node in defined[each]:
            yield path, node
            for used in ast.walk(node):
                if isinstance(used, ast.Name):
                    left.append(used.id)
                elif isinstance(used, ast.Attribute):
                    left.append(used.attr)


def _outside(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a module outside of functions."""
    left: list[ast.AST] = [tree]
    while left:
        each = left.pop()
        yield each
        left += [child for child in ast.iter_child_nodes(each) if not isinstance(child, FUNCTIONS)]


def _slime_names(nodes: Sequence[ast.AST]) -> dict[str, int]:
    """Dotted names of slime's that are imported, or read from an imported module."""
    found: dict[str, int] = {}
    aliases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not node.level and _is_slime(node.module or ""):
            for name in node.names:
                found.setdefault(f"{node.module}.{name.name}", node.lineno)
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            for name in (name for name in node.names if _is_slime(name.name)):
                found.setdefault(name.name, node.lineno)
                head = name.name.partition(".")[0]
                aliases[name.asname or head] = name.name if name.asname else head
    for node in nodes:
        if isinstance(node, ast.Attribute):
            head, *rest = _dotted(node).split(".")
            origin = aliases.get(head, "")
            for part in rest:
                # a class or a function, or no name of slime's
                if origin not in sys.modules:
                    break
                origin = f"{origin}.{part}"
                found.setdefault(origin, node.lineno)
    return found


def _given(node: ast.AST) -> Iterator[str]:
    """Attributes of args that code sets, or asks for by name; * for any."""
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and _named(each.value, {ARGS})
            and not isinstance(each.ctx, ast.Load)
        ):
            yield each.attr
        elif isinstance(each, ast.Call) and _asks_args(each):
            yield str(each.args[1].value) if isinstance(each.args[1], ast.Constant) else "*"


def _asks_args(node: ast.Call) -> bool:
    """Whether it is hasattr(args, ...), getattr or setattr."""
    called = isinstance(node.func, ast.Name) and node.func.id in ASKS
    return called and len(node.args) > 1 and _named(node.args[0], {ARGS})


def _attributes(node: ast.AST, names: set[str]) -> dict[str, int]:
    """Attributes that are read of variables of these names."""
    return {
        each.attr: each.lineno
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load) and _named(each.value, names)
    }


def _removals(node: ast.AST) -> Iterator[int]:
    """Lines that set remove_sample."""
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and each.attr == "remove_sample"
            and isinstance(each.ctx, ast.Store)
        ):
            yield each.lineno


def _samples(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names under which a function holds its samples: its second parameter, and loop variables over it."""
    names = {node.args.args[1].arg}
    for each in ast.walk(node):
        if (
            isinstance(each, ast.For | ast.comprehension)
            and _named(each.iter, names)
            and isinstance(each.target, ast.Name)
        ):
            names.add(each.target.id)
    return names


def _file(module: ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return Path(path).resolve() if path and path.endswith(".py") else None


def _imports(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    package = (module.__package__ or "").split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (origin, *(f"{origin}.{name.name}" for name in node.names))


def _is_slime(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


def _named(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"
