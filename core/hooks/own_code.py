"""The code of the user's functions at the start of a run. A process that starts later must find the same code.

The starting process passes the hashes on (`expect`); its child processes have them in their environment. Does not know which
functions there are.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from millrace.core.errors import ConfigError

EXPECTED = "MILLRACE_OWN_CODE"  # the environment variable


def source_of(module: ModuleType) -> Path | None:
    """The file of a module; None if it has none."""
    try:
        found = inspect.getsourcefile(module)
    except TypeError:
        return None
    return Path(found) if found and os.path.exists(found) else None


def hash_of(file: Path) -> str:
    """Hash of a file's code."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def expect(hashes: Mapping[str, str]) -> None:
    """From now on, this process and its child processes accept only this code for these modules."""
    os.environ[EXPECTED] = json.dumps(dict(hashes), sort_keys=True)


def expected() -> dict[str, str]:
    """Hashes by module; empty if no run was started."""
    found: dict[str, str] = json.loads(os.environ.get(EXPECTED, "{}"))
    return found


def check_unchanged(module: ModuleType, where: str) -> None:
    """Raise ConfigError for a module that was just imported, if its code differs from the code at the start of the run."""
    wanted, source = expected().get(module.__name__), source_of(module)
    if wanted and source and hash_of(source) != wanted:
        raise ConfigError(
            f"{source} changed after the run was started",
            where=where,
            remedy="put it back, or start the same command again: then the change is recorded with the iteration from which it "
            "holds",
        )
