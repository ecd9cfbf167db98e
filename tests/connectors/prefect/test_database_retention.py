"""What the local Prefect server forgets: old iterations and all that hangs on them, and nothing of newer ones."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from docket import Docket
from prefect.server.api import background_workers
from prefect.settings.models.server.services import ServerServicesSettings

from millrace.connectors.prefect import patches, retention, server
from millrace.core.errors import ConfigError

SETTINGS = tomllib.loads((Path(server.__file__).parent / "prefect.toml").read_text())["server"]
LOOKS_EVERY_S = {  # seconds between two looks of each of Prefect's services that look now and then
    "cancellation_cleanup": 60,
    "cleanup_reconciler": 60,
    "db_vacuum": 3600,  # Prefect's own
    "foreman": 60,
    "late_runs": 60,
    "pause_expirations": 60,
    "repossessor": 60,
    "scheduler": 60,  # Prefect's own
}


@pytest.mark.slow
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
    assert result["events"] == [7, 0]
    assert left["events"] == ["event-10", "event-7", "event-8", "event-9"]
    assert left["resources"] == ["r-10", "r-7", "r-8", "r-9"]


@pytest.mark.parametrize("number", ["", "-1", "many", "1.5", "9" * 5000])
def test_a_number_of_iterations_that_is_none_is_named(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_PREFECT_ITERATIONS", number)
    with pytest.raises(ConfigError, match="MILLRACE_PREFECT_ITERATIONS=.*: not a whole number; give one"):
        server.kept_iterations()
    monkeypatch.setenv("MILLRACE_PREFECT_ITERATIONS", "0")
    assert server.kept_iterations() == 0


def test_finished_runs_and_events_leave_the_local_database_after_a_time() -> None:
    vacuum = SETTINGS["services"]["db_vacuum"]
    assert set(vacuum["enabled"]) == {"events", "flow_runs"}
    assert vacuum["retention_period"] == SETTINGS["events"]["retention_period"] == "P14D"


def test_no_service_of_an_idle_server_looks_more_often_than_it_must() -> None:
    looks = {}
    for name, field in ServerServicesSettings.model_fields.items():
        assert field.annotation is not None
        for interval, of_prefect in field.annotation.model_fields.items():
            if interval == "loop_seconds":
                looks[name] = SETTINGS["services"].get(name, {}).get(interval, of_prefect.default)
    assert looks == LOOKS_EVERY_S
    assert SETTINGS["services"]["scheduler"]["recent_deployments_loop_seconds"] == 60


async def test_the_worker_of_the_servers_services_looks_for_work_every_three_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_workers, "Worker", background_workers.Worker)  # and back afterwards
    patches.look_for_work_less_often()
    async with Docket(name="a", url="memory://") as docket:
        worker = background_workers.Worker(docket)
    assert worker.minimum_check_interval == worker.scheduling_resolution == patches.LOOK
    assert patches.LOOK.total_seconds() == 3


def test_what_sqlite_holds_in_memory_does_not_grow_with_the_database(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        retention.bound_page_caches()
        try:
            assert connection.execute("PRAGMA soft_heap_limit").fetchall() == [(retention.PAGE_CACHES,)]
        finally:
            connection.execute("PRAGMA soft_heap_limit = 0")
