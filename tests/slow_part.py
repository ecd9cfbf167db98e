"""A part of the slow tests: `pytest -p tests.slow_part -m slow --part-of COMMIT`.

Files come in an order that follows from the commit, and each file starts at another of its tests, unless they build on each other
(`pytest.mark.sequence`). A test that would end after the time, by its row in slow_seconds.py or the one before it, is skipped: another commit runs it.
A test that takes longer than LONGEST_S, or whose time limit is more than an hour, belongs to no part.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import pytest

from tests.slow_seconds import seconds_of

LONGEST_S = 240.0
LONGEST_LIMIT_S = 3600.0
ALL_FILES_S = 1200.0  # a part that is shorter imports fewer files: all of them take a minute
UNTIL = "MILLRACE_SLOW_PART_UNTIL"  # Unix time; the workers of one run share it
BUSY = 1.5  # a busy machine takes longer
_took: Counter[str] = Counter()
_last: dict[str, float] = {}  # seconds of the last call of a test function in this process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part-of", metavar="COMMIT", required=True, help="the order of the tests follows from it"
    )
    parser.addoption("--part-seconds", type=float, default=240.0, help="tests end within so many")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(UNTIL, str(time.time() + config.getoption("--part-seconds")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A short part imports the first files of its order only."""
    if not collection_path.name.startswith("test_") or not collection_path.is_relative_to(config.rootpath):
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    share = config.getoption("--part-seconds") / ALL_FILES_S
    return True if _number(config.getoption("--part-of"), file) > share * 2**64 else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_id = {item.nodeid: item for item in items if belongs(item.nodeid, _limit_s(item))}
    sequences = {_file(name) for name, item in by_id.items() if item.get_closest_marker("sequence")}
    items[:] = [by_id[name] for name in ordered(config.getoption("--part-of"), list(by_id), sequences)]


def belongs(test: str, limit_s: float = 0.0) -> bool:
    """Whether a test is short enough for a part."""
    return seconds_of(test) <= LONGEST_S and limit_s <= LONGEST_LIMIT_S


def _limit_s(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit else 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # where the imports took all of the time, each process still makes one test: a part that tries nothing says nothing
    if _last and time.time() + _expected_s(item.nodeid) > float(os.environ[UNTIL]):
        pytest.skip("it would end after the time of this part")


def _expected_s(test: str) -> float:
    """How long a test takes: as the last one of its function, without the fixtures, else as its row says."""
    last = _last.get(_function(test))
    return seconds_of(test) if last is None else BUSY * last


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took[report.nodeid] += report.duration
    if report.when == "call":
        _last[_function(report.nodeid)] = report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests whose row in slow_seconds.py says less than they took."""
    for test, seconds in sorted(_took.items()):
        if seconds > BUSY * seconds_of(test):
            terminalreporter.write_line(
                f"{test} took {seconds:.0f} s; tests/slow_seconds.py says {seconds_of(test):.0f}"
            )


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


def _function(test: str) -> str:
    return test.partition("[")[0]


def _file(test: str) -> str:
    return test.partition("::")[0]


def _number(commit: str, text: str) -> int:
    return int.from_bytes(sha256(f"{commit} {text}".encode()).digest()[:8], "big")
