"""Check that the functions a configuration names can be imported and take the arguments they will get, and that upstream's
options exist.

Upstream's options are compared with the source files of the installed versions, which are read and not imported.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from millrace.connectors.sglang.server_args import option_problems
from millrace.core.config import RunConfig, UserFunction
from millrace.core.config.parts.problems import Problem, nearest
from millrace.core.config.rules.passthrough import (
    ROUTER_OWNED,
    ROUTER_REFUSED,
    SGLANG_ELSEWHERE,
    SGLANG_OWNED,
    SGLANG_REFUSED,
)
from millrace.core.contracts.references import variables
from millrace.core.errors import ConfigError
from millrace.core.hooks import load

ROUTER = ("router_args.py",)


def check_hooks(config: RunConfig) -> Iterator[Problem]:
    """Functions that cannot be imported, or do not take the arguments they will get."""
    a = config.algorithm
    advantage = a.advantage if a.advantage.kind == "function" else None
    loss = a.loss if a.loss.kind == "function" else None
    yield from _hook("reward", config.reward, ("sample",))
    yield from _hook("filter.group_filter", config.filter.group_filter, ("samples",))
    yield from _hook("algorithm.advantage", advantage, ("rewards", "group_ids"))
    yield from _hook("algorithm.loss", loss, ("batch",))
    yield from _hook("algorithm.shaping", a.shaping, ("rewards", "response_lengths", "truncated"))
    yield from _hook("run.prepare", config.run.prepare, ("config",))


def _hook(place: str, user_function: UserFunction | None, arguments: Sequence[str]) -> Iterator[Problem]:
    if user_function is None:
        return
    field, path, options = f"{place}.function", user_function.function, user_function.options
    for name in sorted(set(variables(options)) - set(os.environ)):
        reason = f"they refer to {name}, which is not set"
        yield Problem(f"{place}.options", None, reason, f"export {name}, or correct the name")
    try:
        function = load(path, field)
    except ConfigError as error:
        yield Problem(field, path, error.reason, error.remedy or "correct the path")
        return
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        yield Problem(field, path, f"its module fails: {type(error).__name__}: {error}", "correct the module")
        return
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        if not options:
            yield Problem(
                field,
                path,
                f"cannot be called with ({', '.join(arguments)}): {error}",
                f"give it these parameters; its signature is {path.rpartition(':')[2]}{signature}",
            )
            return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        yield Problem(
            f"{place}.options" if options else field,
            ", ".join(options),
            f"{path} does not take them: {error}",
            f"its parameters are {signature}",
        )


def check_passthrough(config: RunConfig) -> Iterator[Problem]:
    """Options that the installed SGLang and sglang-router do not have."""
    refused = {*SGLANG_OWNED, *SGLANG_REFUSED, *SGLANG_ELSEWHERE}
    yield from option_problems({k: v for k, v in config.engines.sglang.items() if k not in refused})
    options = config.engines.router.options if config.engines.router else {}
    yield from _unknown(
        "engines.router.options",
        {name: options[name] for name in sorted(set(options) - set(ROUTER_OWNED) - set(ROUTER_REFUSED))},
        ("sglang_router", ROUTER, ("RouterArgs",)),
        "sglang-router's RouterArgs",
    )


def _unknown(
    section: str,
    options: dict[str, Any],
    where: tuple[str, Sequence[str], Sequence[str]],
    what: str,
) -> Iterator[Problem]:
    known = _fields(*where) if options else None
    if not known:
        return
    for name, value in options.items():
        if name not in known:
            yield Problem(
                f"{section}.{name}",
                value,
                f"the installed version's {what[what.index(' ') + 1 :]} has no such field",
                nearest(name, known),
            )


def _fields(package: str, files: Sequence[str], classes: Sequence[str]) -> set[str]:
    """Names annotated in the classes' bodies, from the source; empty if the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return set()
    names: set[str] = set()
    for root in spec.submodule_search_locations or ():
        for file in files:
            path = Path(root) / file
            if path.is_file():
                for node in ast.parse(path.read_text(encoding="utf-8")).body:
                    if isinstance(node, ast.ClassDef) and node.name in classes:
                        names |= {
                            item.target.id
                            for item in node.body
                            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                        }
    return names
