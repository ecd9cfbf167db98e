"""A part of the slow tests: `pytest -p tests.slow_part -m slow --part-of COMMIT`.

Files come in an order that follows from the commit, and each file starts at another of its tests, unless they build on each other
(`pytest.mark.sequence`). What has not started when the time is over is skipped: another commit runs it. A test with a time limit
of more than an hour belongs to no part.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Sequence
from itertools import groupby

import pytest

LONGEST_S = 3600.0
UNTIL = "MILLRACE_SLOW_PART_UNTIL"  # Unix time; the workers of one run share it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part-of", metavar="COMMIT", required=True, help="the order of the tests follows from it"
    )
    parser.addoption("--part-seconds", type=float, default=600.0, help="no test starts after so many")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(UNTIL, str(time.time() + config.getoption("--part-seconds")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_id = {item.nodeid: item for item in items if _limit_s(item) <= LONGEST_S}
    sequences = {_file(name) for name, item in by_id.items() if item.get_closest_marker("sequence")}
    items[:] = [by_id[name] for name in ordered(config.getoption("--part-of"), list(by_id), sequences)]


def _limit_s(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit else 0.0


def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ[UNTIL]):
        pytest.skip("the time of this part is over")


def ordered(commit: str, tests: Sequence[str], sequences: Collection[str] = ()) -> list[str]:
    """The tests, file by file, in the order of a commit; tests of a file keep their order, from another first one on.

    sequences: files that start at their first test.
    """
    files = {file: list(group) for file, group in groupby(tests, key=_file)}
    result: list[str] = []
    for file in sorted(files, key=lambda name: _number(commit, name)):
        first = 0 if file in sequences else _number(commit, f"{file}::") % len(files[file])
        result += files[file][first:] + files[file][:first]
    return result


def _file(test: str) -> str:
    return test.partition("::")[0]


def _number(commit: str, text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{commit} {text}".encode()).digest()[:8], "big")
