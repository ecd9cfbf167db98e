"""Sends a run's curves and pictures to its trackers, and to the page of its flow run, once they are open."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from millrace.connectors.mlflow.tracker import MlflowTracker
from millrace.connectors.prefect.run_page import RunPage
from millrace.connectors.tensorboard.tracker import TensorboardTracker
from millrace.connectors.wandb.tracker import WandbTracker
from millrace.core.config import RunConfig
from millrace.core.config.tracking import TrackerName
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.progress import waiting
from millrace.core.errors import StorageError, TrackerError
from millrace.core.tracker import RolloutTrace, Tracker
from millrace.tasks.reporting.pictures import Curves

log = logging.getLogger(__name__)

PICTURE_EVERY_S = 10.0
FINISH_S, POLL_S = 120.0, 2.0
TRACED_S = 20.0  # that the end of a run waits for its newest traces
TRACED_SHARE = 0.01  # of a core, at most, that giving rollouts to MLflow takes
MOST = 1000  # calls that wait for a tracker
# metrics that are logged while they are 0, too
FROM_THE_START = ("reward/mean", "train/loss", "train/grad_norm", "eval/")


class Trackers:
    """The trackers of a training run, its page, and the curves that are drawn there."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.curves = Curves()
        self.trackers: dict[TrackerName, Tracker] = {}
        self._backlogs: dict[TrackerName, Backlog] = {}
        self._traces: RolloutTracer | None = None
        self._page: RunPage | None = None
        self._pictured_at = -math.inf

    async def start(
        self, folder_url: str, identity: str, mlflow_run_id: str | None, first_step: int
    ) -> str | None:
        """Start or resume the run in its trackers; returns the id of the MLflow run.

        identity: of the run in its folder. first_step: the first step that is logged now.
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
        """Add an iteration's metrics to the curves at once, and to every tracker when awaited. picture: of the curves.

        A metric that may always be 0, such as a count of failures, is sent after it first differs from 0: else a third of the
        charts would be lines at 0.
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

    def log_traces(self, read: Callable[[], list[RolloutTrace]], index: int, view: str) -> None:
        """Give some rollouts of an iteration to MLflow, as traces. Returns at once; `read` is called in another thread.

        view: how the iteration's page in `millrace view` is reached.
        """
        if self._traces is None and self.mlflow:
            self._traces = RolloutTracer(self.mlflow)
        if self._traces:
            self._traces.give(read, index, view)

    def describe(self, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Keep configuration and tags in every tracker."""
        self._each(lambda tracker: tracker.set_tags(tags))
        self._each(lambda tracker: tracker.log_params(settings))

    def picture_is_old(self) -> bool:
        """Whether the newest picture, if there is one, was kept some seconds ago: drawing takes a quarter of a second."""
        return time.monotonic() - self._pictured_at > PICTURE_EVERY_S

    def finish(self) -> None:
        """Mark the run complete in every tracker. Waits a while for a tracker that fails: the run is complete without it."""
        if self._traces:
            self._traces.close()
        self._each(lambda tracker: tracker.finish())
        until = time.monotonic() + FINISH_S
        for name, backlog in self._backlogs.items():
            with waiting(log, f"{name}, which does not take what it is given"):
                while backlog.left and time.monotonic() < until:
                    time.sleep(POLL_S)
                    backlog.give()
            if backlog.left:
                log.warning(
                    "the run is complete, and %s lacks the newest of it: the run's folder has all", name
                )

    def close(self) -> None:
        """Close the trackers. A failure is logged, and ends no run."""
        if self._traces:
            self._traces.close()
        for name, tracker in self.trackers.items():
            try:
                tracker.close()
            except (TrackerError, OSError) as error:
                log.warning("%s: %s. The run goes on without its end there", name, error)

    def links(self) -> dict[TrackerName, str]:
        """The pages of the curves."""
        return {name: tracker.url() for name, tracker in self.trackers.items()}

    def show_on(self, page: RunPage) -> None:
        """Send the run's lines and pictures to this page from now on."""
        self._page = page

    @property
    def page(self) -> RunPage:
        """The page of the run's flow run. Call `show_on` first."""
        assert self._page is not None, "show_on comes first"
        return self._page

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self.trackers.items():
            if name not in self._backlogs:
                self._backlogs[name] = Backlog(name, tracker)
            self._backlogs[name].give(call)


class Backlog:
    """Calls for one tracker, in order. Calls that fail wait and are repeated: a tracker never ends a run."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.left: deque[Callable[[Tracker], None]] = deque(maxlen=MOST)  # the oldest call is dropped first
        self._name, self._tracker = name, tracker
        self._told = False
        self._one = threading.Lock()

    def give(self, call: Callable[[Tracker], None] | None = None) -> None:
        """Make the waiting calls, and then this one."""
        with self._one:
            if call:
                self.left.append(call)
            while self.left:
                try:
                    self.left[0](self._tracker)
                except (TrackerError, OSError) as error:
                    if not self._told:
                        log.warning("%s: %s. The run goes on, and gives it again", self._name, error)
                    self._told = True
                    return
                self.left.popleft()
            if self._told:
                log.info("%s takes what it is given again, and has all of it", self._name)
            self._told = False


class RolloutTracer:
    """Gives rollouts to MLflow in a thread that nothing waits for, and that takes at most TRACED_SHARE of a core."""

    def __init__(self, mlflow: MlflowTracker) -> None:
        self._mlflow = mlflow
        self._thread: threading.Thread | None = None
        self._due = -math.inf  # monotonic time before which nothing is given

    def give(self, read: Callable[[], list[RolloutTrace]], index: int, view: str) -> None:
        """Give an iteration's rollouts, unless earlier ones are under way or that would be too soon after them."""
        if (self._thread and self._thread.is_alive()) or time.monotonic() < self._due:
            return
        # a daemon: the end of the process does not wait for a server that does not answer
        self._thread = threading.Thread(
            target=self._store, args=(read, index, view), name="rollout-traces", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Wait a while until the newest are stored; a second call does not wait."""
        newest, self._thread = self._thread, None
        if newest:
            newest.join(timeout=TRACED_S)

    def _store(self, read: Callable[[], list[RolloutTrace]], index: int, view: str) -> None:
        worked = time.thread_time()
        try:
            traces = read()
            views = {trace.sample: f"{view}/{trace.group}/{trace.sample}" for trace in traces}
            self._mlflow.log_traces(traces, iteration_number(index), views)
        except (StorageError, TrackerError, OSError) as error:
            said = "the rollouts of iteration %d are in no trace: %s. The run goes on"
            log.warning(said, iteration_number(index), error)
        self._due = time.monotonic() + (time.thread_time() - worked) / TRACED_SHARE


def _log(metrics: Mapping[str, float], step: int, picture: bytes | None, tracker: Tracker) -> None:
    tracker.log_metrics(metrics, step)
    if picture:
        tracker.log_image(picture, "curves", step)
