"""Logs under MILLRACE_HOME are bounded, each in size and all in number, while their writers go on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from millrace.connectors.host.local_files import IN_USE_S, LOG_MIB, LOG_RUNS, bound_logs
from millrace.core.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    return tmp_path


def write_log(path: Path, mib: float, age_s: float = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = int(mib * 2**20) // 16
    path.write_text("".join(f"line {number:010d}\n" for number in range(lines)))
    for changed in (path, path.parent):
        os.utime(changed, (time.time() - age_s,) * 2)
    return path


def test_of_a_long_log_the_newer_half_stays_and_its_writer_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_MIB, "1")
    run = home / "elsewhere" / "run" / "logs"
    logs = [home / "stderr.log", home / "prefect-server.log", home / "logs" / "a-1" / "engine-0.log"]
    logs.append(run / "engine-0.log")
    small, database = write_log(home / "logs" / "a-1" / "engine-1.log", 0.9), write_log(home / "p.db", 3)
    for log in logs:
        last = write_log(log, 3).read_text().splitlines()[-1]
        with log.open("ab") as writer:
            bound_logs(run)
            writer.write(b"the next line\n")
        left = log.read_text().splitlines()
        assert left[-2:] == [last, "the next line"]
        assert left[0].startswith("line ")
        assert 2**18 < log.stat().st_size < 2**20
    assert small.stat().st_size > 0.8 * 2**20
    assert database.stat().st_size > 2 * 2**20


def test_the_logs_of_the_newest_runs_stay_and_those_of_runs_that_may_be_at_work(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_RUNS, "3")
    for number in range(6):
        write_log(home / "logs" / f"run-{number}" / "engine-0.log", 0.001, age_s=2 * IN_USE_S + 60 * number)
    bound_logs()
    assert sorted(path.name for path in (home / "logs").iterdir()) == ["run-0", "run-1", "run-2"]
    for number in range(3, 6):
        write_log(home / "logs" / f"run-{number}" / "engine-0.log", 0.001, age_s=60 * number)
    bound_logs()
    assert len(list((home / "logs").iterdir())) == 3
    for number in range(6):
        write_log(home / "logs" / f"run-{number}" / "engine-0.log", 0.001, age_s=60 * number)
    bound_logs()
    assert len(list((home / "logs").iterdir())) == 6


def test_nothing_is_bounded_by_0_and_a_bound_that_is_no_number_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_RUNS, "0")
    monkeypatch.setenv(LOG_MIB, "0")
    log = write_log(home / "logs" / "a" / "engine-0.log", 1, age_s=9 * IN_USE_S)
    bound_logs()
    assert log.stat().st_size > 0.9 * 2**20
    for name in (LOG_RUNS, LOG_MIB):
        with monkeypatch.context() as other:
            other.setenv(name, "1.5")
            with pytest.raises(ConfigError, match=f"{name}=1.5: not a whole number; give one, or 0"):
                bound_logs()
