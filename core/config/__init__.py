"""The configuration of a run. `RunConfig` is the whole; each of its sections has the module of its name.

A name is loaded when it is first asked for: a process of a user's code takes a section or two, and not the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.core.config.parts.user_function import UserFunction as UserFunction
    from millrace.core.config.run_config import RunConfig as RunConfig

MODULES = {"UserFunction": "parts.user_function", "RunConfig": "run_config"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
    globals()[name] = value
    return value
