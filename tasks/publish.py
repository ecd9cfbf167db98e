"""publish: make the iteration visible and final.

Reads the other tasks' files; logs metrics to MLflow and artifacts to Prefect, then writes manifest.json, last of all.
"""

import asyncio
import time
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from prefect import task

from millrace.connectors.storage.files import recorded
from millrace.connectors.storage.iteration_files import IterationFiles, manifest_from_records
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.parts import read_parts
from millrace.core.accounts.account import Account
from millrace.core.accounts.token_counts import COLUMNS, account_of
from millrace.core.contracts.task_records import (
    EvaluatedMetrics,
    FilterRecord,
    PublishRecord,
    RewardRecord,
    RolloutRecord,
    StepMetrics,
)
from millrace.core.errors import together
from millrace.core.evaluation import evaluation_metrics, held_out_metrics
from millrace.core.hooks.group_filters import ZERO_VARIANCE
from millrace.core.metrics import (
    curriculum_metrics,
    group_metrics,
    reuse_metrics,
    sample_metrics,
    scoring_metrics,
    session_metrics,
    settled,
    staleness_metrics,
    teacher_metrics,
)
from millrace.tasks.batching.credited import carried_to, check_closes
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.reporting import report
from millrace.tasks.run_recorded import may_help

READ = {  # columns of parts for the account and the metrics. Tokens and log-probabilities stay in storage
    "rollouts": [*COLUMNS["rollouts"], "source", "response_length", "turns"],
    "turns": [*COLUMNS["turns"], "failed"],
    "rewards": [
        *("sample_id", "group_id", "scoring", "reward", "reward_parts"),
        *("teacher_s", "teacher_logprobs"),
    ],
}
LARGEST = ("logprob_gap_max", "staleness_max")  # the steps' largest value is reported
SUPERVISED = (
    *("loss", "grad_norm", "lr", "version", "samples", "tokens", "tokens_per_second", "mfu", "entropy"),
    *("moe_aux_loss", "moe_z_loss", "expert_imbalance", "expert_wait"),
)


@dataclass(frozen=True)
class _BatchFigures:
    """What is known of an iteration's fixed batch."""

    metrics: dict[str, float | None]
    account: Account
    without_advantage: int | None  # number of samples, if the advantages of all are 0


@task(name="publish", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def publish(ctx: IterationContext) -> PublishRecord:
    """Log the iteration, then commit its manifest. Raises StorageError if the account of its tokens does not close."""
    metrics, counted = await asyncio.to_thread(_figures, ctx)
    metrics |= await _busy(ctx)
    await report.batch(ctx, counted.account)
    manifest = await _shown(ctx, metrics)
    report.warn_without_gradient(ctx, counted.without_advantage)
    await kill_point(ctx.index, "publish", "in")
    return await asyncio.to_thread(_commit, ctx, manifest)


@task(name="publish", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def publish_supervised(ctx: IterationContext) -> PublishRecord:
    """Log a supervised iteration, then commit its manifest."""
    metrics = _supervised_figures(ctx) | await _busy(ctx)
    return await asyncio.to_thread(_commit, ctx, await _shown(ctx, metrics))


async def _busy(ctx: IterationContext) -> dict[str, float]:
    """How busy the run's GPUs were since the iteration's first task; empty if that is not known."""
    spans = ctx.worked_at.values()
    share = await ctx.runtime.gpu_busy_share(min(start for start, _ in spans)) if spans else None
    return {} if share is None else {"gpu/busy_share": share}


async def _shown(ctx: IterationContext, metrics: dict[str, float]) -> Manifest:
    """Log the iteration, and make its manifest meanwhile; returns the manifest, an earlier attempt's if that was committed."""
    async with together() as beside:
        made = beside.create_task(asyncio.to_thread(_manifest, ctx, metrics))
        await report.iteration(ctx, metrics)
    return made.result()


def _manifest(ctx: IterationContext, metrics: dict[str, float]) -> Manifest:
    return ctx.run_folder.manifest(ctx.index) or manifest_from_records(
        ctx.run_folder,
        ctx.index,
        metrics,
        time.time(),
        ctx.folder.fence.token if ctx.folder.fence else None,
        ctx.run_folder.owner.run_id,
        evaluated=_evaluated(ctx),
        worked=ctx.worked_at,
    )


def _commit(ctx: IterationContext, made: Manifest) -> PublishRecord:
    """Write the manifest, unless an earlier attempt has: the record says what the manifest says."""
    manifest = ctx.run_folder.manifest(ctx.index) or ctx.run_folder.commit_manifest(ctx.index, made)
    tasks = manifest.tasks
    record: PublishRecord = {
        "metrics": tasks["metrics"],
        "committed": tasks["committed"],
        "driver": tasks.get("driver"),
        "run": manifest.run,
        "manifest": manifest.sha256,
    }
    if "evaluated" in tasks:
        record["evaluated"] = tasks["evaluated"]
    if "worked" in tasks:
        record["worked"] = tasks["worked"]
    return record


def _evaluated(ctx: IterationContext) -> EvaluatedMetrics | None:
    """The iteration's evaluation of the weights that it started with."""
    record = ctx.records.get("evaluate_before")
    if record is None:
        return None
    metrics = evaluation_metrics(record)
    return {"version": record["version"], "done": record["done"], "metrics": metrics}


def _figures(ctx: IterationContext) -> tuple[dict[str, float], _BatchFigures]:
    """Every metric of the iteration, by its name in MLflow, artifacts and manifest; and the metrics of the batch."""
    records = ctx.records
    counted = _count(ctx)
    check_closes(counted.account, IterationFiles(ctx.run_folder, ctx.index), ctx.run_folder)
    metrics = {
        **counted.metrics,
        **_train_metrics(records["train_step"]["steps"]),
        **_time_metrics(ctx),
        **_sync_metrics(ctx),
        **counted.account.metrics(),
    }
    if "evaluate" in records:
        metrics.update(evaluation_metrics(records["evaluate"]))
    return {name: float(value) for name, value in metrics.items() if value is not None}, counted


def _supervised_figures(ctx: IterationContext) -> dict[str, float]:
    """Every metric of a supervised iteration, by name."""
    trained = _train_metrics(ctx.records["train_step"]["steps"])
    metrics = {name: value for name, value in trained.items() if name.split("/")[1] in SUPERVISED}
    metrics.update(curriculum_metrics(ctx.records["sample_supervised"]))
    metrics.update(_time_metrics(ctx))
    if "held_out_loss" in ctx.records:
        metrics.update(held_out_metrics(ctx.records["held_out_loss"]))
    return metrics


def _count(ctx: IterationContext) -> _BatchFigures:
    """The metrics of generated, scored and chosen samples, and the account, from one reading of the parts."""
    records, files = ctx.records, IterationFiles(ctx.run_folder, ctx.index)
    rollouts, turns = (_parts(ctx, kind, records["rollout"], READ[kind]) for kind in ("rollouts", "turns"))
    rewards = _parts(ctx, "rewards", records["reward"], READ["rewards"])
    verdicts = files.read_table("verdicts", COLUMNS["verdicts"])
    batch = files.read_table("batch", [*COLUMNS["batch"], "advantage"])
    cut, carried = files.read_deferred(COLUMNS["rollouts"]), carried_to(files)
    account = account_of(rollouts, turns, verdicts, batch, cut=cut, carried=carried)
    scored = scoring_metrics(rollouts, rewards, records["reward"]["seconds"])
    rollouts, rewards = (settled(table, verdicts) for table in (rollouts, rewards))
    generated = sum(account.generated.values())
    rollout_s = records["rollout"]["seconds"] - records["rollout"]["engines_s"]
    metrics: dict[str, float | None] = {
        **sample_metrics(rollouts, rewards),
        **group_metrics(rewards),
        **teacher_metrics(rewards),
        **scored,
        **session_metrics(rollouts, turns),
        **_filter_metrics(ctx.fresh_groups, records["filter"]),
        **curriculum_metrics(records["sample_prompts"]),
        **reuse_metrics(records["sample_prompts"], ctx.config.rollout.prompts),
        "rollout/tokens_per_second": generated / rollout_s if rollout_s else 0.0,
        "rollout/in_flight_limit": records["rollout"].get("in_flight_limit"),
        "rollout/kv_used_max": records["rollout"].get("kv_used"),
        "rollout/queue_max": records["rollout"].get("queue"),
        "staleness/mean": staleness_metrics(rollouts, ctx.version_before).get("staleness/mean", 0.0),
    }
    return _BatchFigures(metrics, account, _without_advantage(batch.column("advantage")))


def _without_advantage(advantages: pa.ChunkedArray) -> int | None:
    """Number of samples, if the advantages of all are 0; None if not, or if the trainer computes them by token."""
    largest = pc.max(pc.abs(advantages)).as_py()
    return len(advantages) if largest is not None and largest <= ZERO_VARIANCE else None


def _parts(
    ctx: IterationContext, kind: str, record: RolloutRecord | RewardRecord, columns: list[str]
) -> pa.Table:
    """The parts that a record names."""
    return read_parts(
        ctx.folder, kind, kind, columns=columns, entries=recorded(record["files"], ctx.folder.url)
    )


def _train_metrics(steps: list[StepMetrics]) -> dict[str, float]:
    """Means over the iteration's steps, and the largest of maxima; learning rate and version are the last step's."""
    numbers: dict[str, list[float]] = {}
    # older weights made all tokens of some steps: nothing was compared there
    comparing = [step for step in steps if step.get("logprob_gap_share") != 0] or steps
    for step in steps:
        for name, value in step.items():
            if name == "logprob_gap_mean" and step not in comparing:
                continue
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers.setdefault(name, []).append(float(value))
    metrics = {f"train/{name}": sum(values) / len(values) for name, values in numbers.items()}
    for name in LARGEST:
        if name in numbers:
            metrics[f"train/{name}"] = max(numbers[name])
    # without "lr" nothing was trained
    if "lr" in steps[-1]:
        metrics["train/lr"] = steps[-1]["lr"]
    metrics["train/version"] = steps[-1]["version"]
    scoring_s = sum(step.get("seconds", {}).get("scoring", 0.0) for step in steps)
    if scoring_s:
        metrics["train/scoring_tokens_per_second"] = sum(numbers["scored_tokens"]) / scoring_s
    return metrics


def _time_metrics(ctx: IterationContext) -> dict[str, float]:
    worked = ctx.worked
    tasks = {name: end - start for name, (start, end) in worked.items() if name != "eager_passes"}
    metrics = {f"time/{name}_s": value for name, value in (tasks | ctx.times.seconds).items()}
    if worked:
        starts, ends = zip(*worked.values(), strict=True)
        metrics["time/iteration_s"] = max(ends) - min(starts)
    phases = ctx.records.get("sync_weights", {}).get("phases", {})
    metrics.update({f"time/sync_{name}_s": value for name, value in phases.items()})
    return metrics


def _sync_metrics(ctx: IterationContext) -> dict[str, float]:
    gap = ctx.records.get("sync_weights", {}).get("prompt_gap")
    return {} if gap is None else {"sync/prompt_gap": gap}


def _filter_metrics(fresh: int, record: FilterRecord) -> dict[str, float]:
    judged = record["groups_kept"] + record["groups_dropped"]
    return {
        "filter/groups_kept": record["groups_kept"],
        "filter/groups_dropped": record["groups_dropped"],
        "filter/zero_variance_share": record["groups_zero_variance"] / max(1, judged),
        "filter/groups_generated": judged,
        "filter/surplus_factor": judged / fresh,
        **{f"filter/dropped_{kind}": count for kind, count in record["dropped_by_kind"].items()},
    }
