"""A driver catches Ray's errors by the classes that Ray raises."""

from __future__ import annotations

import subprocess
import sys

IMPORTED = """
import {module}
import ray._raylet, ray.exceptions
assert ray._raylet.ActorDiedError is ray.exceptions.ActorDiedError, "ray.exceptions was imported twice"
"""


def test_ray_is_imported_once_by_what_a_driver_imports() -> None:
    """prefect_ray imports Ray lazily, and a part of a lazy module is run again."""
    for module in ("millrace.flows.train", "millrace.connectors.ray.task_runs"):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTED.format(module=module)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-500:]
