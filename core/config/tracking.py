"""The `tracking` section."""

from typing import Literal

from pydantic import Field

from millrace.core.config.parts.section import Section

TrackerName = Literal["mlflow", "tensorboard", "wandb"]


class Tracking(Section):
    """Where curves are kept."""

    trackers: list[TrackerName] = Field(
        ["mlflow"],
        description="Trackers that get the curves, besides the run folder, which holds every metric: `mlflow`, `tensorboard` (files below "
        "tensorboard/ of MILLRACE_HOME), `wandb` (its key and mode come from the environment).",
    )
    uri: str | None = Field(
        None, description="MLflow tracking URI; a SQLite file in MILLRACE_HOME when not given."
    )
    system_metrics: bool = Field(
        True, description="MLflow also gets the load of the driver's host, as system/*, a point a minute."
    )
    samples: int = Field(
        4,
        ge=0,
        description="Samples of each iteration on Prefect's page: the best and the worst of some groups, dropped ones among them.",
    )
    rollout_traces: int = Field(
        16,
        ge=0,
        le=100,
        description="Rollouts of each iteration that MLflow gets as traces: the worst, best, median and longest, and the newest failures; 0 "
        "gives none. They take at most 1 % of a core: iterations that end too soon after others have none.",
    )
    trace: int | None = Field(
        None,
        ge=1,
        description="Iteration whose steps are traced, counted from 1: each trainer rank's optimizer steps, and the first 64 steps of each engine that the run starts. The traces are in `traces/` of the run folder; Perfetto opens them.",
    )
