"""Where a run's curves and artifacts go: the MLflow run and the Prefect progress artifact, once they are open."""

from __future__ import annotations

import asyncio
from uuid import UUID

from millrace.connectors.mlflow.tracker import Tracker
from millrace.core.config import RunConfig


class Tracking:
    """The MLflow run of a training run, and the id of its progress artifact."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._tracker: Tracker | None = None
        self._progress: UUID | None = None

    async def start(self, folder_url: str, run_id: str | None) -> Tracker:
        """Start the MLflow run, or resume the one with this id."""
        tracking, run = self.config.tracking, self.config.run
        self._tracker = await asyncio.to_thread(
            Tracker.start, tracking.uri, run.experiment, run.name, folder_url, run_id
        )
        return self._tracker

    @property
    def tracker(self) -> Tracker:
        """The MLflow run; `start` comes first."""
        assert self._tracker is not None, "start comes first"
        return self._tracker

    def show_progress_in(self, artifact: UUID) -> None:
        """Progress goes to this artifact from now on."""
        self._progress = artifact

    @property
    def progress(self) -> UUID:
        """Id of the progress artifact; `show_progress_in` comes first."""
        assert self._progress is not None, "show_progress_in comes first"
        return self._progress
