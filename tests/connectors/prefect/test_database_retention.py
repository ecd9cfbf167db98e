"""What the local Prefect server forgets: old iterations and all that hangs on them, and nothing of newer ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from millrace.connectors.prefect import server
from millrace.core.errors import ConfigError


def test_the_newest_finished_iterations_and_the_one_at_work_stay(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path / 'prefect.db'}",
    }
    command = [sys.executable, "-m", "tests.support.prefect_database"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["trimmed"] == [7, 0]
    left = {name: sorted(names) for name, names in result["left"].items()}
    kept = ("10", "7", "8", "9")
    assert left["flow runs"] == sorted(["a", *(f"a-{number}" for number in kept)])
    tasks = [f"{task}-{number}" for task in ("iteration", "rollout", "train_step") for number in kept]
    assert left["task runs"] == sorted(tasks)
    assert left["logs"] == [f"log-{number}" for number in kept]
    assert left["artifacts"] == ["data-0", *(f"data-{number}" for number in kept)]
    assert len(left["states"]) == 2 * len(kept)
    # up to the end of the newest that went
    assert left["events"] == ["event-10", "event-6", "event-7", "event-8", "event-9"]
    assert left["resources"] == ["r-10", "r-6", "r-7", "r-8", "r-9"]


@pytest.mark.parametrize("number", ["", "-1", "many", "1.5", "9" * 5000])
def test_a_number_of_iterations_that_is_none_is_named(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_PREFECT_ITERATIONS", number)
    with pytest.raises(ConfigError, match="MILLRACE_PREFECT_ITERATIONS=.*: not a whole number; give one"):
        server.kept_iterations()
    monkeypatch.setenv("MILLRACE_PREFECT_ITERATIONS", "0")
    assert server.kept_iterations() == 0


def test_finished_runs_and_events_leave_the_local_database_after_a_time() -> None:
    settings = tomllib.loads((Path(server.__file__).parent / "prefect.toml").read_text())["server"]
    vacuum = settings["services"]["db_vacuum"]
    assert set(vacuum["enabled"]) == {"events", "flow_runs"}
    assert vacuum["retention_period"] == settings["events"]["retention_period"] == "P14D"
