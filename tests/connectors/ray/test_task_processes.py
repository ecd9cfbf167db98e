"""What a process for tasks has imported, of a real head."""

from __future__ import annotations

import os
import sys

import pytest
import ray

from millrace.connectors.ray.task_processes import task_options

UNUSUAL = "wave"  # of the standard library, and imported by nothing else here


@ray.remote
def imported() -> tuple[int, bool]:
    """The process, and whether it has the module."""
    return os.getpid(), UNUSUAL in sys.modules


@pytest.mark.usefixtures("joined")
def test_any_process_for_tasks_has_what_they_import_and_others_do_not() -> None:
    """A name that cannot be imported is left to the task."""
    options = task_options(None, [UNUSUAL, "no_such_module", "ray.no_such_module"])
    tasks = [imported.options(**options).remote() for _ in range(2)]
    with_it, without = ray.get(tasks), ray.get(imported.options(num_cpus=0).remote())
    assert all(found for _, found in with_it)
    assert without[0] not in {pid for pid, _ in with_it}
    assert not without[1]
