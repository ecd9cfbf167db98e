"""The ServerArgs of the installed SGLang, and how their values become its command line.

Owns finding SGLang. Parses its source without an import, which would need CUDA's packages; also, SGLang may be in a separate
folder.
"""

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

PYTHON_PATH = "MILLRACE_SGLANG_PYTHONPATH"  # a folder with SGLang that only the server's process uses
UNTOLD = "as installed"  # the version if pip recorded none
BOOLEAN = ("bool", "Optional[bool]", "bool | None")


@dataclass(frozen=True)
class ServerArg:
    """A field of ServerArgs, as needed for the command line."""

    flag: str
    boolean: bool | None  # True: only true or false; None: also other values
    off: bool  # its default is false
    negated: bool  # it has a --no- flag
    parsed: bool  # SGLang parses the value, so that even a list is one argument


GRAPHS = ("cuda_graph", "disable_cuda_graph", "disable_decode_cuda_graph")  # prefixes of options for graphs
LARGEST_GRAPH = (
    "cuda_graph_max_bs_decode",
    "cuda_graph_max_bs",
)  # its name since SGLang 0.5.17, and before
# Requests in a batch. Each graph takes memory and start time, and larger batches hide the cost of kernel launches
MOST_GRAPHS = 512


def sglang_finds(package: str) -> bool:
    """Whether a server would find a package, in SGLang's separate folder or beside millrace."""
    return bool(_folders(package)) or bool(importlib.util.find_spec(package))


def own_folders() -> list[str]:
    """The folders in which a server looks for packages before it looks beside millrace."""
    return [folder for folder in os.environ.get(PYTHON_PATH, "").split(os.pathsep) if folder]


def _folders(package: str) -> list[Path]:
    """The folders in which a server would find a package."""
    named = [Path(folder) / package for folder in own_folders()]
    own = [folder for folder in named if folder.is_dir()]
    if own:
        return own[:1]
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def server_args() -> tuple[str, dict[str, ServerArg]]:
    """The version of SGLang that a server would find, and its fields by name; no fields if the source cannot be read."""
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
    """Parse a field. Its annotation is its type, or A[type, Arg(...), ...] (Annotated)."""
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
    """Fields of engines.sglang that the installed SGLang does not have, or does not accept on its command line."""
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
    """SGLang's option for the largest batch with CUDA graphs in decoding: the number of requests that an engine has at once.

    Empty if `options` already set these graphs, or the installed SGLang has no such option.
    """
    if any(name.startswith(GRAPHS) and "prefill" not in name for name in options):
        return {}
    name = next((name for name in LARGEST_GRAPH if name in server_args()[1]), None)
    return {name: min(concurrency, MOST_GRAPHS)} if name else {}


def option_arguments(options: Mapping[str, Any]) -> list[str]:
    """engines.sglang as arguments; option_problems must have found no problem."""
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
    """One option: true gives only the flag, a list its elements, and a mapping JSON. Empty if the option is off."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    elements = value if isinstance(value, list) else [value]
    return [flag, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in elements)]
