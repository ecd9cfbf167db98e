"""What the processes that run Prefect's tasks import as soon as Ray starts them.

Ray keeps more processes than there are tasks at once, and gives a task to any of them: to one that has never had a task too, in which
imports would hold it up for seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence

IMPORTS = "MILLRACE_IMPORTS"  # names of modules, in a process for tasks
SET_UP = {"worker_process_setup_hook": f"{__name__}.import_named"}  # called in every process of a run


def runtime_env(modules: Sequence[str]) -> dict[str, dict[str, str]]:
    """Of a Ray task whose processes import these modules."""
    return {"env_vars": {IMPORTS: ",".join(modules)}}


def import_named() -> None:
    """Import what this process is to have. What is missing is for the task to report."""
    for name in filter(None, os.environ.get(IMPORTS, "").split(",")):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
