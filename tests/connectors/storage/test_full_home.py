"""A full disk under MILLRACE_HOME: whatever a library raised, the folder is named with what helps, and no traceback is logged."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.connectors.host.local_files import is_full, room_at_home
from millrace.connectors.prefect.run_errors import FLOW_RUNS, _ErrorsOnce
from millrace.core.errors import ConfigError, StorageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Within, a file of this process cannot grow, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "raised", [RuntimeError("database"), OSError(5, "I/O"), ConfigError("tracking.uri")], ids=repr
)
def test_whatever_is_raised_names_the_home_where_its_disk_is_full(home: Path, raised: Exception) -> None:
    with pytest.raises(type(raised)) as other, room_at_home():
        raise raised
    assert other.value is raised
    with no_room(), pytest.raises(StorageError) as full, room_at_home():
        raise raised
    assert str(full.value).startswith(f"MILLRACE_HOME = {home}: the disk is full; free space there")
    assert full.value.__cause__ is raised
    assert list(home.iterdir()) == []  # the probe is gone


def test_a_folder_with_room_is_not_full(tmp_path: Path) -> None:
    assert not is_full(tmp_path)
    with no_room():
        assert is_full(tmp_path)


def test_the_log_of_a_run_has_a_line_and_no_traceback_then() -> None:
    def record() -> logging.LogRecord:
        try:
            raise RuntimeError("disk I/O error\n[SQL: INSERT INTO log ...]")
        except RuntimeError:
            return logging.LogRecord(FLOW_RUNS, logging.ERROR, __file__, 1, "failed", (), sys.exc_info())

    usual, full = record(), record()
    assert _ErrorsOnce().filter(usual)
    assert usual.exc_info
    with no_room():
        assert _ErrorsOnce().filter(full)
    assert (full.getMessage(), full.exc_info) == ("RuntimeError: disk I/O error", None)
