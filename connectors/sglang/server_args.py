"""SGLang's ServerArgs as the installed version has them, and how their values go onto its command line.

Owns where SGLang is found. Its source is read and not imported: that takes CUDA's packages, and SGLang may live in a
folder of its own.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from millrace.core.config.parts.problems import Problem, nearest

PYTHON_PATH = "MILLRACE_SGLANG_PYTHONPATH"  # where the server's process alone finds SGLang
UNTOLD = "as installed"  # the version where pip left none
BOOLEAN = ("bool", "Optional[bool]", "bool | None")


@dataclass(frozen=True)
class ServerArg:
    """A field of ServerArgs, as far as its command line goes."""

    flag: str
    boolean: bool | None  # true or false and nothing else; None: that too
    off: bool  # false is what it is when not given
    negated: bool  # there is a --no- flag
    parsed: bool  # SGLang parses its value, which is one argument even if it is a list


GRAPHS = ("cuda_graph", "disable_cuda_graph", "disable_decode_cuda_graph")  # how options about them start
LARGEST_GRAPH = (
    "cuda_graph_max_bs_decode",
    "cuda_graph_max_bs",
)  # its name from SGLang 0.5.17 on, and before
MOST_GRAPHS = 512  # requests: each graph takes memory and time at the start, and larger batches hide the cost of launches


def sglang_finds(package: str) -> bool:
    """Whether a server would find a package: in SGLang's own folder, or beside millrace."""
    return bool(_folders(package)) or bool(importlib.util.find_spec(package))


def _folders(package: str) -> list[Path]:
    """Folders of a package as a server would find it."""
    named = [Path(folder) / package for folder in os.environ.get(PYTHON_PATH, "").split(os.pathsep) if folder]
    own = [folder for folder in named if folder.is_dir()]
    if own:
        return own[:1]
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def server_args() -> tuple[str, dict[str, ServerArg]]:
    """The version of SGLang that a server would find, and its fields by name; none where its source cannot be read."""
    for folder in _folders("sglang"):
        path = folder / "srt" / "server_args.py"
        if path.is_file():
            versions = [found.version for found in distributions(name="sglang", path=[str(folder.parent)])]
            return (versions or [UNTOLD])[0], _fields(path.read_text(encoding="utf-8"))
    return UNTOLD, {}


@lru_cache(maxsize=1)
def _fields(source: str) -> dict[str, ServerArg]:
    return {
        item.target.id: _field(item.target.id, item.annotation, item.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def _field(name: str, annotation: ast.expr, default: ast.expr | None) -> ServerArg:
    """A field's annotation is its type, or A[type, Arg(...), ...] (Annotated)."""
    kind, given = annotation, {}
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        kind, *rest = annotation.slice.elts
        given = {
            word.arg: word.value for item in rest if isinstance(item, ast.Call) for word in item.keywords
        }
    text, named = ast.unparse(kind), given.get("cli_name")
    return ServerArg(
        flag=str(named.value) if isinstance(named, ast.Constant) else f"--{name.replace('_', '-')}",
        boolean=True if text in BOOLEAN else None if "bool" in text else False,
        off=isinstance(default, ast.Constant) and default.value is False,
        negated="action" in given and "BooleanOptionalAction" in ast.unparse(given["action"]),
        parsed="type_parser" in given,
    )


def option_problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Fields of engines.sglang that the installed SGLang does not have, or does not take on its command line."""
    version, known = server_args() if options else (UNTOLD, {})
    for name, value in options.items() if known else ():
        field, arg = f"engines.sglang.{name}", known.get(name)
        if arg is None:
            reason = f"SGLang {version} has no such ServerArgs field"
            yield Problem(field, value, reason, nearest(name, known))
        elif value is None:
            continue
        elif arg.boolean is False and isinstance(value, bool):
            yield Problem(
                field, value, "it takes a value, not true or false", "put a word such as off in quotes"
            )
        elif arg.boolean and not isinstance(value, bool):
            yield Problem(field, value, "it takes true or false", "write it without quotes")
        elif value is False and not (arg.off or arg.negated):
            reason = f"the command line of SGLang {version} cannot say false to it"
            yield Problem(field, value, reason, "remove it: SGLang then decides")


def decode_graphs(options: Mapping[str, Any], concurrency: int) -> dict[str, int]:
    """SGLang's option for the largest batch that decodes by CUDA graphs: as many requests as an engine has at once.

    Nothing where `options` say anything about these graphs, or the installed SGLang has no such option.
    """
    if any(name.startswith(GRAPHS) and "prefill" not in name for name in options):
        return {}
    name = next((name for name in LARGEST_GRAPH if name in server_args()[1]), None)
    return {name: min(concurrency, MOST_GRAPHS)} if name else {}


def option_arguments(options: Mapping[str, Any]) -> list[str]:
    """engines.sglang, in which option_problems finds none, as arguments."""
    known = server_args()[1] if options else {}
    arguments: list[str] = []
    for name, value in options.items():
        arg = known.get(name)
        flag = arg.flag if arg else f"--{name.replace('_', '-')}"
        if value is False and arg and arg.negated:
            arguments.append(f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, list) and arg and arg.parsed:
            arguments += [flag, json.dumps(value)]
        else:
            arguments += argument(flag, value)
    return arguments


def argument(flag: str, value: Any) -> list[str]:
    """One option: true is the flag alone, a list is its elements, and mappings are JSON. Nothing where it is off."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    elements = value if isinstance(value, list) else [value]
    return [flag, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in elements)]
