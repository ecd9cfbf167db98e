"""TensorBoard's and Weights & Biases' trackers with the real packages: what was logged is read back from their files."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.tensorboard.tracker import TensorboardTracker
from millrace.connectors.wandb.tracker import WandbTracker
from millrace.core.contracts.tracker import Tracker, flat

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
