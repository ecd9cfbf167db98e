"""What a run's processes on a cluster do as soon as Ray starts them: imports, and addresses that no proxy is asked for.

Ray keeps more processes than there are tasks at once, and gives a task to any of them: to one that has never had a task too, in which
imports would hold it up for seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from typing import Any

from millrace.core.own_addresses import has_proxy, reach_directly, reach_own_directly

IMPORTS = "MILLRACE_IMPORTS"  # names of modules, in a process for tasks
SET_UP = {"worker_process_setup_hook": f"{__name__}.set_up"}  # called in every process of a run


def task_options(node: str | None, imports: Sequence[str]) -> dict[str, Any]:
    """Of a Ray task that runs on a node if it lives, in a process that has imported these modules. Ray does not start it again."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_retries": 0,
        "runtime_env": {"env_vars": {IMPORTS: ",".join(imports)}},
    }
    if node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
    return options


def set_up() -> None:
    """Import what this process is to have. What is missing is for the task to report."""
    reach_own_directly()
    reach_nodes_directly()
    for name in filter(None, os.environ.get(IMPORTS, "").split(",")):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def reach_nodes_directly() -> None:
    """From now on, this process and its children ask for addresses of the cluster's nodes without a proxy of the environment."""
    if has_proxy():
        import ray

        reach_directly(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
