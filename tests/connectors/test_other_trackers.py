"""TensorBoard's and Weights & Biases' trackers with the real packages: what was logged is read back from their files."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.connectors.host.process_identity import wait_ended
from millrace.connectors.tensorboard.tracker import TensorboardTracker
from millrace.connectors.wandb.tracker import WandbTracker
from millrace.core.errors import TrackerError
from millrace.core.tracker import Tracker, flat

COMMAND = ["millrace", "--planted-on-the-command-line"]
SECRET = "pl4nted-in-the-environment"
SETTINGS: dict[str, Any] = {
    "run": {"name": "a", "seed": None},
    "data": {"sources": [{"name": "sums"}]},
    "reward": {"options": {"key": "${env:REWARD_KEY}"}},
}
KINDS = {
    "tensorboard": lambda: TensorboardTracker("e", "a-1", 0),
    "wandb": lambda: WandbTracker("e", "a", "a-1"),
}


@pytest.fixture
def picture() -> bytes:
    from matplotlib.figure import Figure

    data = io.BytesIO()
    Figure(figsize=(2, 1)).savefig(data, format="png")
    return data.getvalue()


@pytest.fixture(params=KINDS)
def start(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Tracker]:
    pytest.importorskip(request.param)
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", COMMAND)
    for name in ("REWARD_KEY", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    return KINDS[request.param]


def stored(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_what_is_logged_is_there_and_no_secret_of_the_environment(
    start: Callable[[], Tracker], tmp_path: Path, picture: bytes
) -> None:
    tracker = start()
    tracker.set_tags({"prefect.flow_run_url": "http://host/runs/1"})
    tracker.log_params(SETTINGS)
    tracker.log_metrics({"reward/mean": 0.25, "train/loss": float("nan")}, 0)
    tracker.log_metrics({"reward/mean": 0.5, "reward_part/format": 1.0}, 1)
    tracker.log_image(picture, "curves", 1)
    url = tracker.url()
    tracker.finish()
    tracker.close()
    assert Path(url).is_dir()
    found = stored(tmp_path)
    for text in (
        "reward/mean",
        "reward_part/format",
        "data.sources.0.name",
        "${env:REWARD_KEY}",
        "http://host/runs/1",
    ):
        assert text.encode() in found, text
    assert b"train/loss" not in found
    assert SECRET.encode() not in found
    assert COMMAND[1].encode() not in found


def test_tensorboard_shows_each_step_once_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    first = TensorboardTracker("e x", "a-1", 0)
    for step in range(4):
        first.log_metrics({"reward/mean": step / 8}, step)
    first.close()
    again = TensorboardTracker("e x", "a-1", 3)  # iteration 3 was not committed
    again.log_metrics({"reward/mean": 0.5}, 3)
    again.close()
    shown = EventAccumulator(again.url())
    shown.Reload()
    points = [(event.step, event.value) for event in shown.Scalars("reward/mean")]
    assert points == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.5)]
    assert again.url() == str(tmp_path / "tensorboard" / "e-x" / "a-1")


def test_settings_have_dotted_names() -> None:
    assert json.loads(json.dumps(dict(flat(SETTINGS)))) == {
        "run.name": "a",
        "run.seed": None,
        "data.sources.0.name": "sums",
        "reward.options.key": "${env:REWARD_KEY}",
    }
    assert flat({"empty": {}, "list": [1, {"a": 2}], "none": []}) == [
        ("empty", {}),
        ("list", [1, {"a": 2}]),
        ("none", []),
    ]


class FakeRun:
    """wandb's run of a process that has died: each of its calls raises."""

    offline = True

    def __init__(self, error: Exception) -> None:
        self.config = self.summary = self
        self.error = error

    def log(self, *_: object, **__: object) -> None:
        raise self.error

    def update(self, *_: object, **__: object) -> None:
        raise self.error

    def finish(self, **_: object) -> None:
        raise self.error


CALLS: dict[str, Callable[[Tracker, bytes], object]] = {
    "log_metrics": lambda tracker, picture: tracker.log_metrics({"a": 1.0}, 1),
    "log_params": lambda tracker, picture: tracker.log_params({"a": 1}),
    "set_tags": lambda tracker, picture: tracker.set_tags({"a": "b"}),
    "log_image": lambda tracker, picture: tracker.log_image(picture, "curves", 1),
    "finish": lambda tracker, picture: tracker.finish(),
    "close": lambda tracker, picture: tracker.close(),
}
ASKS_NOTHING = {"url"}


def test_every_call_of_a_tracker_has_a_row() -> None:
    assert {*CALLS, *ASKS_NOTHING} == {name for name in vars(Tracker) if not name.startswith("_")}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("wandb.errors.errors", TrackerError),
        ("wandb.sdk.mailbox.mailbox", TrackerError),
        ("wandb", TrackerError),
        ("elsewhere", ValueError),
    ],
)
def test_an_error_of_wandbs_own_type_is_a_trackers_failure(
    call: str, place: str, expected: type[Exception], picture: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the run: these types have no base in common but Exception."""
    base = ValueError if place == "elsewhere" else Exception
    run = FakeRun(type("Failed", (base,), {"__module__": place})("the service is gone"))
    package: Any = types.ModuleType("wandb")
    package.Settings, package.init, package.Image = dict, lambda **_: run, lambda image: image
    monkeypatch.setitem(sys.modules, "wandb", package)
    tracker = WandbTracker("e", "a", "a-1")
    for _ in range(2):  # what failed is tried again, an end too
        with pytest.raises(expected, match="the service is gone"):
            CALLS[call](tracker, picture)


def test_calls_after_wandbs_process_has_died_fail_as_a_trackers(
    tmp_path: Path, picture: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker("e", "a", "a-1")
    tracker.log_metrics({"a": 1.0}, 0)
    children = psutil.Process().children(recursive=True)
    service = [process for process in children if process.name().startswith("wandb")]
    assert service
    for process in service:
        process.kill()
    assert not wait_ended(service, 60)
    with pytest.raises(TrackerError):  # what is logged before may lie in a pipe
        tracker.finish()
    for call in CALLS.values():
        with pytest.raises(TrackerError):
            call(tracker, picture)
