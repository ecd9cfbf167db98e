"""What Arrow has freed stays with the process for the stages of an iteration that follow: their pages cost nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.slow_members import slow_but

PAGES = """
import resource, sys, time
import millrace
assert "pyarrow" not in sys.modules
import numpy as np
import pyarrow as pa

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fill():
    before = faults()
    for buffer in [pa.allocate_buffer(8 << 20) for _ in range(8)]:
        np.frombuffer(buffer, np.uint8)[::4096] = 1
    return faults() - before

first = fill()
fill()
later = []
for _ in range(3):
    time.sleep(1.2)
    later.append(fill())
print(first, min(later))  # the least: a machine may stand still for longer than memory is kept
"""


@pytest.mark.parametrize("given", slow_but([None, "1000"], None))
def test_memory_that_was_freed_a_second_ago_is_there_unless_the_environment_says_otherwise(
    given: str | None,
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    if given:
        environment["MIMALLOC_PURGE_DELAY"] = given
    done = subprocess.run(
        [sys.executable, "-c", PAGES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, later = map(int, done.stdout.split())
    assert first > 8  # each buffer has a page of its own at least, however large pages are
    assert (later > 8) is (given is not None)


def test_nothing_that_starts_a_driver_or_a_shard_imports_arrow_before() -> None:
    starts = "import sys, ray, ray._private.worker, prefect.engine, prefect.flow_engine; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
