"""One MLflow run per training run: metrics, parameters, tags and artifacts.

Owns the tracking client and where its database lies when none is configured. Importing mlflow takes seconds, so that
happens inside `start`.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from millrace.core.errors import MillraceError

PARAM_LIMIT = 500  # characters of a parameter's value
PARAM_BATCH = 100
METRIC_BATCH = 1000
TAG_LIMIT = 5000  # characters of a tag's value
FOLDER_TAG = "millrace.run_folder"


class Tracker:
    """A started or resumed MLflow run."""

    def __init__(self, client: Any, uri: str, experiment_id: str, run_id: str) -> None:
        self._client = client
        self.uri = uri
        self.experiment_id = experiment_id
        self.run_id = run_id

    @classmethod
    def start(cls, uri: str | None, experiment: str, name: str, folder: str, run_id: str | None) -> Tracker:
        """Start the run of a run folder, by its URL, or resume it by its id, or else by that folder in the experiment.

        Raises MillraceError naming tracking.uri if the store cannot be reached.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "1")
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of each table that it makes
        where = uri or default_uri()
        try:
            client = MlflowClient(tracking_uri=where)
            experiment_id = _experiment(client, experiment, where)
            found = (
                run_id if run_id and _exists(client, run_id) else _by_folder(client, experiment_id, folder)
            )
            if found is None:
                found = client.create_run(experiment_id, run_name=name, tags={FOLDER_TAG: folder}).info.run_id
            else:
                client.update_run(found, status="RUNNING")  # it may have been marked finished or failed
        except (MlflowException, OSError) as error:
            raise MillraceError(f"tracking.uri = {where}: {error}") from error
        return cls(client, where, experiment_id, found)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one point a metric, in one call; what is not finite, or is there at this step, is left out."""
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [
            Metric(_name(name), float(value), now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        if points and any(held == step for held, _ in self.history(points[-1].key)):
            return  # a driver died between this call and the record that it was made
        for at in range(0, len(points), METRIC_BATCH):
            self._client.log_batch(self.run_id, metrics=points[at : at + METRIC_BATCH])

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Keep nested values as flat parameters; ones that are there already stay as they are."""
        from mlflow.entities import Param

        held = self._client.get_run(self.run_id).data.params
        flat = [Param(name, str(value)[:PARAM_LIMIT]) for name, value in _flatten(values) if name not in held]
        for at in range(0, len(flat), PARAM_BATCH):
            self._client.log_batch(self.run_id, params=flat[at : at + PARAM_BATCH])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        from mlflow.entities import RunTag

        self._client.log_batch(
            self.run_id, tags=[RunTag(name, value[:TAG_LIMIT]) for name, value in tags.items()]
        )

    def log_artifact(self, data: bytes, name: str) -> None:
        """Keep bytes as a file of the run; `name` may hold folders."""
        target = PurePosixPath(name)
        inside = str(target.parent) if target.parent.name else None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / target.name
            path.write_bytes(data)
            self._client.log_artifact(self.run_id, str(path), artifact_path=inside)

    def history(self, name: str) -> list[tuple[int, float]]:
        """Points of a metric by step."""
        points = self._client.get_metric_history(self.run_id, _name(name))
        return sorted({point.step: point.value for point in points}.items())

    def finish(self) -> None:
        """Mark the run finished."""
        self._client.set_terminated(self.run_id, status="FINISHED")

    def url(self) -> str:
        """Page of the run: on the tracking server, or on the page that `ui_command` opens."""
        base = self.uri if self.uri.startswith("http") else "http://127.0.0.1:5000"
        return f"{base}/#/experiments/{self.experiment_id}/runs/{self.run_id}"


def default_uri() -> str:
    """A SQLite file in MILLRACE_HOME."""
    home = Path(os.environ.get("MILLRACE_HOME", "~/.millrace")).expanduser()
    home.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{home / 'mlflow.db'}"


def ui_command(uri: str | None) -> str:
    """The command that opens the MLflow page on loopback."""
    return (
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow server --host 127.0.0.1 --port 5000 --workers 1 "
        f"--backend-store-uri {uri or default_uri()}"
    )


def _experiment(client: Any, name: str, uri: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    location = None
    if uri.startswith("sqlite:///"):
        location = (
            (Path(uri.removeprefix("sqlite:///")).parent / "mlflow-artifacts" / name).absolute().as_uri()
        )
    return str(client.create_experiment(name, artifact_location=location))


def _exists(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_run(run_id)
    except MlflowException:
        return False
    return bool(found.info.lifecycle_stage == "active")


def _by_folder(client: Any, experiment_id: str, folder: str) -> str | None:
    quoted = folder.replace("'", "''")
    wanted = f"tags.`{FOLDER_TAG}` = '{quoted}'"
    found = client.search_runs(
        [experiment_id], filter_string=wanted, order_by=["start_time ASC"], max_results=1
    )
    return found[0].info.run_id if found else None


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat += _flatten(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat


def _name(name: str) -> str:
    """Metric names may hold letters, digits, _-.:/ and spaces; @ (as in pass@k) becomes _at_."""
    return name.replace("@", "_at_")
