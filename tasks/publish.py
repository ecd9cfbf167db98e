"""publish: make the iteration visible and final.

Reads what the other tasks wrote; logs metrics to MLflow and artifacts to Prefect, then writes manifest.json, last of all.
"""

from __future__ import annotations

import asyncio
import time

import pyarrow.compute as pc
from prefect import task

from millrace.connectors.storage.manifest import Manifest
from millrace.connectors.storage.parts import list_parts, list_takeovers, read_parts
from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import FilterRecord, PublishRecord, StepMetrics
from millrace.core.metrics import group_metrics, sample_metrics, staleness_metrics
from millrace.tasks import report
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point

SUPERVISED = (
    *("loss", "grad_norm", "lr", "version", "samples", "tokens", "tokens_per_second", "entropy"),
    *("moe_aux_loss", "moe_z_loss"),
)
PARTS = ("rollouts", "rewards")
TABLES = ("prompts.parquet", "verdicts.parquet", "batch.parquet", "step.json")


@task(name="publish", retries=2, retry_delay_seconds=1)
async def publish(ctx: IterationContext) -> PublishRecord:
    """Log the iteration, then commit its manifest."""
    metrics = await asyncio.to_thread(iteration_metrics, ctx)
    await report.iteration(ctx, metrics)
    await kill_point(ctx.index, "publish", "in")
    await asyncio.to_thread(_commit, ctx, metrics)
    return {"metrics": metrics}


@task(name="publish", retries=2, retry_delay_seconds=1)
async def publish_supervised(ctx: IterationContext) -> PublishRecord:
    """Log a supervised iteration, then commit its manifest."""
    trained = _train_metrics(ctx.records["train_step"]["steps"])
    metrics = {name: value for name, value in trained.items() if name.split("/")[1] in SUPERVISED}
    metrics.update(_time_metrics(ctx))
    await report.iteration(ctx, metrics)
    await asyncio.to_thread(_commit, ctx, metrics)
    return {"metrics": metrics}


def _commit(ctx: IterationContext, metrics: dict[str, float]) -> None:
    parts = [path for folder in PARTS for path in list_parts(ctx.folder, folder)]
    others = [*list_takeovers(ctx.folder), *ctx.folder.list("results")]
    files = ctx.folder.entries([*TABLES, *parts, *others])
    tasks = {"trained_version": ctx.version_after, "metrics": metrics, "committed": time.time()}
    if ctx.folder.fence:
        tasks["driver"] = ctx.folder.fence.token
    ctx.run_folder.commit_manifest(ctx.index, Manifest(iteration=ctx.index, files=files, tasks=tasks))


def iteration_metrics(ctx: IterationContext) -> dict[str, float]:
    """Every figure of the iteration, by name: the same names in MLflow, the artifacts and the manifest."""
    rollouts = read_parts(ctx.folder, "rollouts", "rollouts")
    rewards = read_parts(ctx.folder, "rewards", "rewards")
    records = ctx.records
    metrics = {
        **sample_metrics(rollouts, rewards),
        **group_metrics(rewards),
        **_train_metrics(records["train_step"]["steps"]),
        **_time_metrics(ctx),
        **_filter_metrics(ctx.config, records["filter"]),
    }
    generated = float(pc.sum(rollouts.column("response_length")).as_py() or 0)
    rollout_s = records["rollout"]["seconds"]
    metrics["rollout/tokens_per_second"] = generated / rollout_s if rollout_s else 0.0
    metrics["staleness/mean"] = staleness_metrics(rollouts, ctx.version_before).get("staleness/mean", 0.0)
    if "evaluate" in records:
        metrics.update(report.evaluation_metrics(records["evaluate"]))
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _train_metrics(steps: list[StepMetrics]) -> dict[str, float]:
    """Means over the iteration's steps, of maxima the largest; the learning rate and version are the last step's."""
    numbers: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers.setdefault(name, []).append(float(value))
    metrics = {f"train/{name}": sum(values) / len(values) for name, values in numbers.items()}
    metrics["train/logprob_gap_max"] = max(numbers["logprob_gap_max"])
    metrics["train/lr"] = steps[-1]["lr"]
    metrics["train/version"] = steps[-1]["version"]
    return metrics


def _time_metrics(ctx: IterationContext) -> dict[str, float]:
    metrics = {f"time/{name}_s": seconds for name, seconds in ctx.seconds.items()}
    phases = ctx.records.get("sync_weights", {}).get("phases", {})
    metrics.update({f"time/sync_{name}_s": value for name, value in phases.items()})
    return metrics


def _filter_metrics(config: RunConfig, record: FilterRecord) -> dict[str, float]:
    judged = record["groups_kept"] + record["groups_dropped"]
    return {
        "filter/groups_kept": record["groups_kept"],
        "filter/groups_dropped": record["groups_dropped"],
        "filter/zero_variance_share": record["groups_zero_variance"] / max(1, judged),
        "filter/groups_generated": judged,
        "filter/surplus_factor": judged / config.rollout.prompts,
    }
