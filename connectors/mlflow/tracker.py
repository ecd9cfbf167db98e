"""One MLflow run per training run: metrics, parameters, tags and artifacts.

Owns the tracking client, and the default database. Importing mlflow takes seconds, so `start` imports it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import Any, Concatenate, ParamSpec, cast

from millrace.connectors.host.local_files import home, locked
from millrace.connectors.host.own_folders import temporary_folder
from millrace.connectors.mlflow.server import SQLITE, local_page
from millrace.connectors.mlflow.traces import spans_of, store_traces
from millrace.core.contracts.progress import waiting
from millrace.core.errors import MillraceError, TrackerError
from millrace.core.metric_names import portable_name
from millrace.core.plain_text import whole
from millrace.core.tracker import RolloutTrace, flat

log = logging.getLogger(__name__)
P = ParamSpec("P")

LOCKED = "database is locked"  # SQLite's message
LOCKED_S, POLL_S = 600.0, 1.0
PARAM_LIMIT = 500  # characters of a parameter's value
PARAM_BATCH = 100
METRIC_BATCH = 1000
SAMPLED_EVERY_S, SAMPLES_A_POINT = 10, 6  # of the host's load: one point per minute
TAG_LIMIT = 5000  # characters of a tag's value
FOLDER_TAG = "millrace.run_folder"
IDENTITY_TAG = "millrace.run_identity"  # differs for each run started in the same folder
OVERVIEW = "0_overview"  # the first section of charts
FIRST = {  # its curves, besides held-out rewards
    "reward/mean": "reward",
    "rollout/response_length_mean": "response_length",
    "rollout/truncated_share": "truncated_share",
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/entropy": "entropy",
    "train/kl": "kl",
    "train/logprob_gap_mean": "logprob_gap",
    "rollout/tokens_per_second": "tokens_per_second",
    "time/iteration_s": "iteration_s",
}
HELD_OUT = re.compile(r"^eval/([^/]+)/reward_mean$")
KIND_TAG, KIND = (
    "mlflow.experimentKind",
    "custom_model_development",
)  # shows MLflow's pages for training, not for LLM apps
CURVES = "workflowType=machine_learning"  # for this visit, even if the browser remembers the other pages


def _taken(
    call: Callable[Concatenate[MlflowTracker, P], None],
) -> Callable[Concatenate[MlflowTracker, P], None]:
    """Decorator: a failure of the store is raised as TrackerError, naming the store."""

    @wraps(call)
    def taken(self: MlflowTracker, *args: P.args, **kwargs: P.kwargs) -> None:
        from mlflow.exceptions import MlflowException

        try:
            call(self, *args, **kwargs)
        # a server or a store of an earlier form implements no traces
        except (MlflowException, NotImplementedError, OSError) as error:
            raise TrackerError(
                f"MLflow's store refuses the data: {str(error).partition(chr(10))[0]}",
                where=f"tracking.uri = {self.uri}",
            ) from error

    return cast("Callable[Concatenate[MlflowTracker, P], None]", taken)


class MlflowTracker:
    """A started or resumed MLflow run."""

    def __init__(self, client: Any, uri: str, experiment_id: str, run_id: str) -> None:
        self._client = client
        self.uri = uri
        self.experiment_id = experiment_id
        self.run_id = run_id
        self._curves: dict[str, dict[int, float]] = {}  # values by metric and step, of the curves read so far
        self._monitor: Any = None  # the thread that logs the host's load

    @classmethod
    def start(
        cls, uri: str | None, experiment: str, name: str, folder: str, identity: str, run_id: str | None
    ) -> MlflowTracker:
        """Start the MLflow run of a run, or resume it, found by its id or by the run's identity in the experiment.

        A copied or moved folder holds the id of the original's MLflow run, so it gets a new one. So does a new run in a
        folder that was deleted.
        Waits while another process has locked the store's database. Raises MillraceError naming tracking.uri if the store cannot
        be reached.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "1")
        # at INFO it logs each table that it creates
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        # it logs the traceback of each database error that it also raises
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        where, until = uri or default_uri(), time.monotonic() + LOCKED_S
        with waiting(log, f"MLflow's store ({where})"):
            while True:
                try:
                    return cls._start(where, experiment, name, folder, identity, run_id)
                except MillraceError as error:
                    if LOCKED not in str(error) or time.monotonic() > until:
                        raise
                    time.sleep(POLL_S)

    @classmethod
    def _start(
        cls, where: str, experiment: str, name: str, folder: str, identity: str, run_id: str | None
    ) -> MlflowTracker:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            with made_once(where):
                client = MlflowClient(tracking_uri=where)
                experiment_id = _experiment(client, experiment, where)
            if not (run_id and _is_of(client, run_id, folder)):
                run_id = _by_identity(client, experiment_id, identity)
            if run_id is None:
                tags = {FOLDER_TAG: folder, IDENTITY_TAG: identity}
                run_id = client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
            else:
                # an earlier attempt may have marked it finished or failed
                client.update_run(run_id, status="RUNNING")
        except (MlflowException, OSError) as error:
            raise _unreachable(where, error) from error
        return cls(client, where, experiment_id, run_id)

    @_taken
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one point per metric. Skips values that are not finite, and a step that was logged before."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = [*_overview(metrics).items(), *metrics.items()]
        points = [
            Metric(portable_name(name), float(value), now, step)
            for name, value in named
            if math.isfinite(value)
        ]
        if not points:
            return
        if step in self._curve(points[-1].key):
            return  # an earlier driver logged this step, and died before it recorded that
        for at in range(0, len(points), METRIC_BATCH):
            self._client.log_batch(self.run_id, metrics=points[at : at + METRIC_BATCH])
        for point in points:
            if point.key in self._curves:
                self._curves[point.key][step] = point.value

    @_taken
    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log nested values as flat parameters. Existing parameters keep their values."""
        from mlflow.entities import Param

        existing = self._client.get_run(self.run_id).data.params
        params = [
            Param(name, whole(str(value))[:PARAM_LIMIT])
            for name, value in ((portable_name(name), value) for name, value in flat(values))
            if name not in existing
        ]
        for at in range(0, len(params), PARAM_BATCH):
            self._client.log_batch(self.run_id, params=params[at : at + PARAM_BATCH])

    @_taken
    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        from mlflow.entities import RunTag

        self._client.log_batch(
            self.run_id, tags=[RunTag(name, whole(value)[:TAG_LIMIT]) for name, value in tags.items()]
        )

    @_taken
    def log_artifact(self, data: bytes, name: str) -> None:
        """Store bytes as a file of the run; `name` may contain folders."""
        target = PurePosixPath(name)
        subfolder = str(target.parent) if target.parent.name else None
        with temporary_folder("millrace-artifact") as folder:
            path = Path(folder) / target.name
            path.write_bytes(data)
            self._client.log_artifact(self.run_id, str(path), artifact_path=subfolder)

    @_taken
    def log_traces(self, traces: Sequence[RolloutTrace], iteration: int, views: Mapping[str, str]) -> None:
        """Store rollouts of an iteration as traces of the run; a rollout that was stored before replaces itself.

        views: how the page of each in `millrace view` is reached, by its sample.
        """
        made = [spans_of(trace, self.run_id, iteration, views[trace.sample]) for trace in traces]
        if made:
            store_traces(self._client, self.uri, self.experiment_id, self.run_id, made)

    def history(self, name: str) -> list[tuple[int, float]]:
        """Points of a metric, (step, value) in order of steps: read from the store once, then with what was logged here."""
        return sorted(self._curve(portable_name(name)).items())

    def _curve(self, key: str) -> dict[int, float]:
        """A metric's values by step. Read once, since a long run's curve takes 3 MiB of memory per thousand rows."""
        if key not in self._curves:
            points = self._client.get_metric_history(self.run_id, key)
            self._curves[key] = {point.step: point.value for point in points}
        return self._curves[key]

    def log_image(self, png: bytes, name: str, step: int) -> None:
        """Store a picture as NAME.png, replacing an earlier one."""
        self.log_artifact(png, f"{name}.png")

    def watch_system(self) -> None:
        """Log the load of this process's host as system/*, until `close`."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        logging.getLogger("mlflow.system_metrics").setLevel(
            logging.ERROR
        )  # it warns if the run ends before it
        self._monitor = SystemMetricsMonitor(
            self.run_id,
            sampling_interval=SAMPLED_EVERY_S,
            samples_before_logging=SAMPLES_A_POINT,
            resume_logging=True,
            tracking_uri=self.uri,
        )
        self._monitor.start()

    @_taken
    def finish(self) -> None:
        """Mark the run finished."""
        self.close()
        self._client.set_terminated(self.run_id, status="FINISHED")

    def close(self) -> None:
        """End the thread that logs the host's load."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None

    def url(self) -> str:
        """The page of the run's curves, on the tracking server or on the local server that `millrace ui` starts."""
        return run_page(self.uri, self.experiment_id, self.run_id)


def _overview(metrics: Mapping[str, float]) -> dict[str, float]:
    """The most important curves, logged a second time under names that MLflow's pages sort first."""
    held_out = {name: f"held_out_{match[1]}" for name in metrics if (match := HELD_OUT.match(name))}
    return {
        f"{OVERVIEW}/{short}": metrics[name]
        for name, short in {**FIRST, **held_out}.items()
        if name in metrics
    }


def default_uri() -> str:
    """A SQLite file in MILLRACE_HOME."""
    return f"sqlite:///{home() / 'mlflow.db'}"


def is_server(uri: str) -> bool:
    """Whether a tracking URI is a server's address; a server has its own pages."""
    return uri.startswith(("http://", "https://"))


def run_page(uri: str, experiment_id: str, run_id: str) -> str:
    """The page with a run's curves."""
    return f"{_page(uri)}/#/experiments/{experiment_id}/runs/{run_id}/model-metrics?{CURVES}"


def find_page(uri: str, run_id: str | None = None) -> str:
    """The page of a run's curves; without a run, the list of runs that contains the newest.

    Raises MillraceError naming tracking.uri if the store cannot be reached, or has no such run.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    try:
        with made_once(uri):
            client = MlflowClient(tracking_uri=uri)
            experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        if run_id:
            return run_page(uri, client.get_run(run_id).info.experiment_id, run_id)
        newest = client.search_runs(experiments, order_by=["start_time DESC"], max_results=1)
    except (MlflowException, OSError) as error:
        raise _unreachable(uri, error) from error
    if not newest:
        return _page(uri)
    return f"{_page(uri)}/#/experiments/{newest[0].info.experiment_id}/runs?{CURVES}&compareRunsMode=CHART"


def _unreachable(uri: str, error: Exception) -> MillraceError:
    """The error for a store that cannot be reached or fails."""
    return MillraceError(
        str(error),
        where=f"tracking.uri = {uri}",
        remedy="start the tracking server, or correct the URI",
    )


def _page(uri: str) -> str:
    return uri.rstrip("/") if is_server(uri) else local_page()


def made_once(uri: str) -> contextlib.AbstractContextManager[None]:
    """Lock a SQLite file while its tables are created or migrated: MLflow takes no lock, and processes would collide.

    A tracking server creates its tables by itself.
    """
    if not uri.startswith(SQLITE):
        return contextlib.nullcontext()
    file = Path(uri.removeprefix(SQLITE)).absolute()
    return locked(file.with_name(f"{file.name}.lock"))


def _experiment(client: Any, name: str, uri: str) -> str:
    """Id of the experiment, created if it does not exist."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        if KIND_TAG not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, KIND_TAG, KIND)
        return str(experiment.experiment_id)
    location = None
    if uri.startswith(SQLITE):
        location = (Path(uri.removeprefix(SQLITE)).parent / "mlflow-artifacts" / name).absolute().as_uri()
    try:
        return str(client.create_experiment(name, artifact_location=location, tags={KIND_TAG: KIND}))
    except MlflowException:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:  # so the failure was not another process's creating it first
            raise
        return str(experiment.experiment_id)


def _is_of(client: Any, run_id: str, folder: str) -> bool:
    """Whether the MLflow run exists and belongs to this run folder, after links are resolved, or names no folder."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException:
        return False
    named = str(run.data.tags.get(FOLDER_TAG, folder))
    same = os.path.realpath(named) == os.path.realpath(folder)
    return same and run.info.lifecycle_stage == "active"


def _by_identity(client: Any, experiment_id: str, identity: str) -> str | None:
    quoted = identity.replace("'", "''")
    condition = f"tags.`{IDENTITY_TAG}` = '{quoted}'"
    runs = client.search_runs(
        [experiment_id], filter_string=condition, order_by=["start_time ASC"], max_results=1
    )
    return runs[0].info.run_id if runs else None
