"""Making a run of several features: its configuration with what stands in for servers and buckets replaced, and what it left."""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
import pyarrow.parquet as pq
import yaml

from tests.pairs.features import BUCKET, ENGINE, STORED, TEACHER, WEIGHTS
from tests.pairs.outcomes import together, whole
from tests.support import mcp_server
from tests.support.flow_runs import Workplace, sync_records


@dataclass(frozen=True)
class Surroundings:
    """What stand-ins stand for: addresses of servers that run, empty where nothing asks for one, and URLs in buckets."""

    teacher: str
    engine: str
    bucket: str
    weights: str

    def replaced(self, value: Any) -> Any:
        """A value without stand-ins."""
        if isinstance(value, Mapping):
            return {name: self.replaced(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.replaced(item) for item in value]
        if not isinstance(value, str):
            return value
        others = {"@python": sys.executable, "@mcp_server": mcp_server.__file__}
        for name, here in {
            TEACHER: self.teacher,
            ENGINE: self.engine,
            BUCKET: self.bucket,
            WEIGHTS: self.weights,
            **others,
        }.items():
            value = value.replace(name, here)
        return value


@dataclass(frozen=True)
class Left:
    """What a run left: tables by name, figures by iteration, steps."""

    folder: Path
    features: Sequence[str]
    out: str
    home: Path  # MILLRACE_HOME
    asked: int  # requests that the engine outside had
    uploaded: Sequence[str]  # names of objects that were ever in the bucket for weights

    @property
    def model(self) -> Path:
        return self.home.parent / "model"

    @cached_property
    def record(self) -> dict[str, Any]:
        """run.json."""
        loaded: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return loaded

    def has(self, feature: str) -> bool:
        return feature in self.features

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of all iterations' tables of a name."""
        return [row for path in self.paths(name) for row in pq.read_table(path).to_pylist()]

    def paths(self, name: str) -> list[Path]:
        return sorted(self.folder.glob(f"iterations/*/{name}.parquet"))

    @cached_property
    def figures(self) -> list[dict[str, float]]:
        """The metrics of each iteration."""
        paths = sorted(self.folder.glob("iterations/*/manifest.json"))
        return [json.loads(path.read_text())["tasks"]["metrics"] for path in paths]

    @cached_property
    def steps(self) -> list[list[dict[str, Any]]]:
        """The optimizer steps of each iteration."""
        return [
            json.loads(path.read_text())["steps"]
            for path in sorted(self.folder.glob("iterations/*/step.json"))
        ]

    @cached_property
    def syncs(self) -> list[dict[str, Any]]:
        """The records of the syncs that sent weights."""
        return [record for record in sync_records(self.folder) if record["phases"]]

    @cached_property
    def batches(self) -> list[list[dict[str, Any]]]:
        """The trained rows of each iteration."""
        return [pq.read_table(path).to_pylist() for path in self.paths("batch")]

    @property
    def batch(self) -> list[dict[str, Any]]:
        return [row for rows in self.batches for row in rows]


def configuration(names: Sequence[str], around: Surroundings, root: str) -> dict[str, Any]:
    """The values of the run's file."""
    made = together(names)
    assert made.accepted, (made.clash, made.problems)
    settings = {"storage.root": root, **made.settings}
    values: dict[str, Any] = around.replaced(whole(settings))
    return values


def make(place: Workplace, names: Sequence[str], around: Surroundings, root: str, local: Path) -> Left:
    """Train it, and the run whose rollouts it takes before. root: where run folders lie; local: the same as a folder here."""
    if "rollouts_from" in names:
        source = [name for name in names if name != "rollouts_from"]
        values = configuration(source, around, root)
        values["run"]["name"] = STORED
        (place.folder / f"{STORED}.yaml").write_text(yaml.safe_dump(values))
        place.call("train", f"{STORED}.yaml")
    file = f"pair-{uuid.uuid4().hex}.yaml"
    (place.folder / file).write_text(yaml.safe_dump(configuration(names, around, root)))
    home = place.folder / "home"
    out = place.call("train", file)
    asked = _asked(around.engine) if around.engine else 0
    return Left(local / "a", names, out, home, asked, _ever_in(around.weights))


def _asked(engine: str) -> int:
    """Requests that an engine has had."""
    with urllib.request.urlopen(f"{engine}/server_info") as answer:
        return int(json.load(answer)["counters"]["requests"])


def _ever_in(url: str) -> list[str]:
    """Names of the objects below a URL of a bucket that keeps versions, those that were removed included."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    found = boto3.client("s3").list_object_versions(Bucket=bucket, Prefix=prefix)
    return [version["Key"] for version in found.get("Versions", [])]
