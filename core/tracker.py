"""The interface of a tracker, which keeps a run's curves, and the tags by which flow runs and deployments are found.

Owns no connection: connectors/mlflow, connectors/tensorboard and connectors/wandb have one each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from millrace.core.config import RunConfig

OF_RUNS = ("run:", "preset:", "model:")  # prefixes of the tags of a run


@dataclass(frozen=True)
class TraceSpan:
    """A part of a rollout: a turn, a tool's call or the reward. start, end: seconds of the epoch. Values become JSON."""

    name: str
    kind: Literal["turn", "tool", "reward"]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    start: float
    end: float
    failed: bool = False


@dataclass(frozen=True)
class RolloutTrace:
    """A rollout with its parts, one at least. why: it was chosen as the worst, best, median or longest one, or as failed."""

    sample: str
    group: str
    why: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    failed: bool
    spans: Sequence[TraceSpan]


class Tracker(Protocol):
    """A started or resumed run in one tracker. Calls may block."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one point per metric. A step that was logged before is not shown twice; values that are not finite are left out."""

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Keep the configuration, with dotted names for nested values, as in `rollout.prompts`."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags by which the run is found."""

    def log_image(self, png: bytes, name: str, step: int) -> None:
        """Keep a picture, the newest under its name."""

    def url(self) -> str:
        """The address or folder of the curves."""

    def finish(self) -> None:
        """Mark the run complete."""

    def close(self) -> None:
        """Release this process's resources, whether the run is complete or not."""


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested values by dotted names; items of a list of mappings by their number, as in data.sources.0.path."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def run_tags(config: RunConfig) -> set[str]:
    """The run's name, its preset and its model, a tag each."""
    model = config.model.path.rstrip("/").rpartition("/")[2]
    learns = "sft" if config.algorithm.supervised else config.algorithm.preset
    return {f"run:{config.run.name}", f"preset:{learns}", f"model:{model}"}


def with_run_tags(had: Iterable[str], of_run: set[str]) -> list[str]:
    """The tags of a flow run, with the run's tags instead of tags of the same kinds from its deployment's recipe."""
    return sorted({tag for tag in had if not tag.startswith(OF_RUNS)} | of_run)
