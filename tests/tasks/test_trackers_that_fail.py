"""A tracker whose store takes nothing for a while, or at all, ends no run: what it is to keep waits, and a line says so once."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.mlflow import tracker
from millrace.connectors.mlflow.tracker import MlflowTracker
from millrace.core.config import RunConfig
from millrace.core.errors import TrackerError
from millrace.core.tracker import Tracker
from millrace.tasks.runtime import tracking
from millrace.tasks.runtime.tracking import Backlog, Trackers
from tests.support.wrong_configs import GOOD


class Disk:
    """Takes what it is given while it has room."""

    def __init__(self, error: Exception) -> None:
        self.had: list[tuple[str, int]] = []
        self.full = False
        self._error = error

    def take(self, what: str, step: int) -> None:
        if self.full:
            raise self._error
        self.had.append((what, step))


@pytest.mark.parametrize("error", [TrackerError("no room"), OSError(28, "No space left on device")], ids=repr)
def test_what_is_not_taken_waits_in_order_and_is_told_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    disk: Any = Disk(error)
    backlog = Backlog("mlflow", disk)
    with caplog.at_level(logging.INFO):
        for step in range(6):
            disk.full = step in (1, 2, 3)
            backlog.give(lambda tracker, step=step: tracker.take("reward", step))  # type: ignore[misc, attr-defined]
    assert disk.had == [("reward", step) for step in range(6)]
    assert not backlog.left
    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"mlflow: {error}. The run goes on, and gives it again"
    assert second == "mlflow takes what it is given again, and has all of it"


def test_what_waits_is_bounded_and_a_mistake_of_ours_is_none_of_a_trackers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "MOST", 3)
    disk: Any = Disk(TrackerError("no room"))
    backlog, disk.full = Backlog("mlflow", disk), True
    for step in range(9):
        backlog.give(lambda tracker, step=step: tracker.take("reward", step))  # type: ignore[misc, attr-defined]
    disk.full = False
    backlog.give()
    assert disk.had == [("reward", step) for step in (6, 7, 8)]

    def wrong(_: Tracker) -> None:
        raise KeyError("reward")

    with pytest.raises(KeyError):
        backlog.give(wrong)


def test_a_tracker_that_cannot_be_let_go_of_ends_no_run_and_keeps_no_other_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """wandb's process had died: the end of a complete run was an error."""
    closed: list[str] = []

    class Closed:
        def __init__(self, name: str, error: Exception | None) -> None:
            self.name, self.error = name, error

        def close(self) -> None:
            closed.append(self.name)
            if self.error:
                raise self.error

    trackers = Trackers(RunConfig.model_validate(GOOD))
    dead: Any = Closed("wandb", ConnectionResetError("Connection lost"))
    refusing: Any = Closed("tensorboard", TrackerError("the service is gone"))
    alive: Any = Closed("mlflow", None)
    trackers.trackers = {"wandb": dead, "tensorboard": refusing, "mlflow": alive}
    with caplog.at_level(logging.WARNING):
        trackers.close()
    assert closed == ["wandb", "tensorboard", "mlflow"]
    assert [record.getMessage() for record in caplog.records] == [
        "wandb: Connection lost. The run goes on without its end there",
        "tensorboard: the service is gone. The run goes on without its end there",
    ]


@pytest.mark.slow
async def test_a_locked_database_of_mlflow_is_waited_for_and_has_all_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tracebacks came, and no word of what was awaited."""
    monkeypatch.setattr(tracker, "POLL_S", 0.05)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}?timeout=0.05"

    def start(name: str) -> MlflowTracker:
        return MlflowTracker.start(uri, "e", name, f"/runs/{name}", name, None)

    first = await asyncio.to_thread(start, "first")
    backlog = Backlog("mlflow", first)
    other = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    backlog.give(lambda store: store.log_metrics({"reward": 0.5}, 0))
    backlog.give(lambda store: store.set_tags({"a": "b"}))
    backlog.give(lambda store: store.finish())
    assert len(backlog.left) == 3
    begun = threading.Event()

    def second_starts() -> MlflowTracker:
        begun.set()
        return start("second")

    starting = asyncio.create_task(asyncio.to_thread(second_starts))
    await asyncio.to_thread(begun.wait)
    await asyncio.sleep(0.3)
    assert not starting.done()
    other.execute("ROLLBACK")
    assert (await starting).run_id != first.run_id
    backlog.give()
    assert not backlog.left
    run = first._client.get_run(first.run_id)
    assert (run.data.metrics["reward"], run.data.tags["a"], run.info.status) == (0.5, "b", "FINISHED")
    told = [
        record
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("millrace")
    ]
    assert [record.name for record in told] == ["millrace.tasks.runtime.tracking"]
    assert "database is locked" in told[0].getMessage()
    assert f"tracking.uri = {uri}" in told[0].getMessage()
