"""Sets up a run's processes when Ray starts them: imports, and direct connections to nodes without a proxy.

Ray keeps more processes than tasks run at once, and may give a task to a process that never had one. Without the imports at its
start, the task would wait seconds for them.
"""

import contextlib
import importlib
import os
from collections.abc import Sequence
from typing import Any

from millrace.connectors.host.own_addresses import has_proxy, reach_directly, reach_own_directly

IMPORTS = "MILLRACE_IMPORTS"  # environment variable of a process for tasks: names of modules
SET_UP = {"worker_process_setup_hook": f"{__name__}.set_up"}  # called in every process of a run


def task_options(node: str | None, imports: Sequence[str]) -> dict[str, Any]:
    """Options of a Ray task that prefers a node while it lives, in a process with these imports. Ray does not retry it."""
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
    """Set up this process. The task itself reports modules that cannot be imported."""
    reach_own_directly()
    reach_nodes_directly()
    for name in filter(None, os.environ.get(IMPORTS, "").split(",")):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def reach_nodes_directly() -> None:
    """Let this process and its children connect to the cluster's nodes directly, even if the environment names a proxy."""
    if has_proxy():
        import ray

        reach_directly(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
