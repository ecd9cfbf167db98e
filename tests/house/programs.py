"""What a program in a string imports exists: no type checker reads it, and it may run only in a slow test."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from textwrap import dedent

from tests.house.source import PACKAGE, TEST_FOLDER, SourceFile, Violation

MADE_UP = "tests/house/"  # whose tests write modules that do not exist
VALUE = "_value_"  # of an f-string's replacement field
REMEDY = "Import it from where it stands now."


def lost_imports(files: Iterable[SourceFile]) -> Iterator[Violation]:
    """Report imports of the project's modules and names that do not exist, in strings that are programs."""
    files = list(files)
    known = {file.module: file for file in files}
    for file in files:
        if file.path.startswith(MADE_UP):
            continue
        for node in ast.walk(file.tree):
            program = _program(node)
            for name in _imported(program) if program else ():
                if not _exists(name, known):
                    line: int = node.lineno  # type: ignore[attr-defined]
                    yield Violation(
                        file.path, line, f"a program imports {name}, which does not exist", REMEDY
                    )


def _program(node: ast.AST) -> ast.Module | None:
    """The program in a string; None if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    else:
        return None
    try:
        return ast.parse(dedent(text)) if "import " in text else None
    except SyntaxError:
        return None


def _imported(program: ast.Module) -> Iterator[str]:
    """The dotted names of the project that a program imports."""
    for node in ast.walk(program):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{item.name}".removesuffix(".*") for item in node.names]
        yield from (
            name for name in names if name.split(".")[0] in (PACKAGE, TEST_FOLDER) and VALUE not in name
        )


def _exists(name: str, known: dict[str, SourceFile]) -> bool:
    """Whether the name is a module, a folder of modules, or bound at the top of a module."""
    if name in known or any(module.startswith(f"{name}.") for module in known):
        return True
    module, _, bound = name.rpartition(".")
    return module in known and bound in set(_bound(known[module].tree.body))


def _bound(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements bind, those in branches included."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (item.asname or item.name.split(".")[0] for item in statement.names)
        else:
            nodes = ast.walk(statement)
            yield from (n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            for field in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _bound(handler.body)
