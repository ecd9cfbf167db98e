"""Where a run's curves and pictures go: its trackers, and the page of its flow run, once they are open."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from millrace.connectors.mlflow.tracker import MlflowTracker
from millrace.connectors.prefect.run_page import RunPage
from millrace.connectors.tensorboard.tracker import TensorboardTracker
from millrace.connectors.wandb.tracker import WandbTracker
from millrace.core.config import RunConfig
from millrace.core.config.tracking import TrackerName
from millrace.core.contracts.tracker import Tracker
from millrace.tasks.pages.curves import Curves

PICTURE_EVERY_S = 10.0
FROM_THE_START = ("reward/mean", "train/loss", "train/grad_norm", "eval/")  # where 0 says something


class Tracking:
    """The trackers of a training run, its page, and the curves that are drawn there."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.curves = Curves()
        self.trackers: dict[TrackerName, Tracker] = {}
        self._page: RunPage | None = None
        self._pictured_at = -math.inf

    async def start(
        self, folder_url: str, identity: str, mlflow_run_id: str | None, first_step: int
    ) -> str | None:
        """Start the run in its trackers, or go on with it; returns the id of the MLflow run.

        identity: of the run in its folder. first_step: the first that is logged now.
        """
        run, settings = self.config.run, self.config.tracking
        starts: dict[TrackerName, Callable[[], Tracker]] = {
            "mlflow": lambda: MlflowTracker.start(
                settings.uri, run.experiment, run.name, folder_url, identity, mlflow_run_id
            ),
            "tensorboard": lambda: TensorboardTracker(run.experiment, identity, first_step),
            "wandb": lambda: WandbTracker(run.experiment, run.name, identity),
        }
        for name in settings.trackers:
            self.trackers[name] = await asyncio.to_thread(starts[name])
        mlflow = self.mlflow
        if mlflow and settings.system_metrics:
            await asyncio.to_thread(mlflow.watch_system)
        return mlflow.run_id if mlflow else mlflow_run_id

    @property
    def mlflow(self) -> MlflowTracker | None:
        """The MLflow run; None without MLflow."""
        tracker = self.trackers.get("mlflow")
        assert tracker is None or isinstance(tracker, MlflowTracker)
        return tracker

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, picture: bytes | None = None
    ) -> Awaitable[None]:
        """Add an iteration's figures to the curves, and then, where it is awaited, to every tracker. picture: of the curves.

        Trackers get a figure that may always be 0, such as a count of failures, once it is not: else a third of their charts are
        lines at 0.
        """
        self.curves.add(metrics, step)
        metrics = {
            name: value
            for name, value in metrics.items()
            if name in self.curves.moved or name.startswith(FROM_THE_START)
        }
        if picture:
            self._pictured_at = time.monotonic()
        return asyncio.to_thread(self._each, partial(_log, metrics, step, picture))

    def describe(self, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Keep configuration and tags in every tracker."""
        self._each(lambda tracker: tracker.set_tags(tags))
        self._each(lambda tracker: tracker.log_params(settings))

    def picture_is_old(self) -> bool:
        """Whether the newest picture, if there is one, was kept some seconds ago: to draw one takes a quarter of a second."""
        return time.monotonic() - self._pictured_at > PICTURE_EVERY_S

    def finish(self) -> None:
        """Mark the run complete in every tracker."""
        self._each(lambda tracker: tracker.finish())

    def close(self) -> None:
        """Let go of the trackers."""
        self._each(lambda tracker: tracker.close())

    def links(self) -> dict[TrackerName, str]:
        """Where the curves are to be seen."""
        return {name: tracker.url() for name, tracker in self.trackers.items()}

    def show_on(self, page: RunPage) -> None:
        """Lines and pictures of the run go to this page from now on."""
        self._page = page

    @property
    def page(self) -> RunPage:
        """The page of the run's flow run; `show_on` comes first."""
        assert self._page is not None, "show_on comes first"
        return self._page

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self.trackers.values():
            call(tracker)


def _log(metrics: Mapping[str, float], step: int, picture: bytes | None, tracker: Tracker) -> None:
    tracker.log_metrics(metrics, step)
    if picture:
        tracker.log_image(picture, "curves", step)
