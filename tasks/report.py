"""What people look at: MLflow curves and Prefect artifacts.

Owns their names and shapes; decides nothing. Artifact keys carry the run's identity, so each run has its own artifacts,
also beside one of its name under another storage root. Iterations count from 1.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import re
import shlex
from collections.abc import Awaitable
from typing import Any

import pyarrow.compute as pc
from prefect.artifacts import (
    acreate_image_artifact,
    acreate_link_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.runtime import flow_run

from millrace.connectors.mlflow.tracker import is_server
from millrace.core.account.account import Account
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.task_records import EvaluateRecord, HeldOutRecord
from millrace.core.group_filters import ZERO_VARIANCE
from millrace.core.retention import due
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime

log = logging.getLogger(__name__)

REWARDS_BY_GROUP = (
    "select group_id, count(*) as samples, min(reward) as least, max(reward) as most, any_value(prompt) as prompt "
    "from batches where iteration = {iteration} group by group_id order by most desc, group_id"
)
LINE = (
    ("reward", "reward/mean"),
    ("grad norm", "train/grad_norm"),
    ("log-prob gap", "train/logprob_gap_mean"),
    ("rollout s", "time/rollout_s"),
    ("train s", "time/train_step_s"),
)
SUPERVISED_LINE = (
    ("loss", "train/loss"),
    ("grad norm", "train/grad_norm"),
    ("tokens a step", "train/tokens"),
    ("train s", "time/train_step_s"),
)
HEADLINES = (
    "reward/mean",
    "rollout/response_length_mean",
    "rollout/truncated_share",
    "filter/zero_variance_share",
    "train/loss",
    "train/grad_norm",
    "train/logprob_gap_mean",
    "rollout/tokens_per_second",
)


async def open_tracking(runtime: Runtime, run_id: str | None) -> str:
    """Start or resume the MLflow run; link it and the Prefect flow run to each other."""
    config = runtime.config
    folder = runtime.run_folder.store.url
    tracker = await runtime.tracking.start(folder, run_id)
    tags = {
        "prefect.flow_run_id": flow_run.id or "",
        "prefect.flow_run_url": flow_run.ui_url or "",
    }
    await asyncio.to_thread(tracker.set_tags, tags)
    await asyncio.to_thread(tracker.log_params, config.model_dump(mode="json"))
    shown = "" if is_server(tracker.uri) else "; `millrace ui` starts the server of this page"
    await acreate_link_artifact(
        link=tracker.url(), key=_key(runtime, "mlflow"), description=f"Curves of {config.run.name}{shown}"
    )
    done = await asyncio.to_thread(runtime.run_folder.first_open_iteration)
    progress = await acreate_progress_artifact(
        progress=100 * done / config.run.iterations,
        key=_key(runtime, "progress"),
        description="Iterations complete",
    )
    runtime.tracking.show_progress_in(progress)
    tracked: str = tracker.run_id
    return tracked


async def close_tracking(runtime: Runtime) -> None:
    """Mark the MLflow run as finished."""
    await asyncio.to_thread(runtime.tracking.tracker.finish)


async def iteration(ctx: IterationContext, metrics: dict[str, float]) -> None:
    """Log one iteration: metrics to MLflow in one call, progress, summary and samples to Prefect."""
    runtime, config, number = ctx.runtime, ctx.config, iteration_number(ctx.index)
    log.info("%s: %s", _name(ctx), _headline(metrics, config.algorithm.supervised))
    calls: list[Awaitable[Any]] = [
        asyncio.to_thread(runtime.tracking.tracker.log_metrics, metrics, number),
        acreate_markdown_artifact(
            _summary(ctx, metrics), key=_key(runtime, "iteration"), description=_name(ctx).capitalize()
        ),
        aupdate_progress_artifact(runtime.tracking.progress, progress=100 * number / config.run.iterations),
    ]
    if config.tracking.samples:
        rows = await asyncio.to_thread(_samples, ctx)
        calls.append(
            acreate_table_artifact(rows, key=_key(runtime, "samples"), description=f"Samples of {_name(ctx)}")
        )
    await asyncio.gather(*calls)
    if number == config.run.iterations or due(number, config.checkpoint.every):
        picture = await asyncio.to_thread(_curve, runtime)
        image = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        await acreate_image_artifact(
            image, key=_key(runtime, "reward"), description="Mean reward by iteration"
        )
        await asyncio.to_thread(runtime.tracking.tracker.log_artifact, picture, "reward.png")


async def tokens(ctx: IterationContext, account: Account) -> None:
    """What became of the iteration's tokens, as a table."""
    runtime = ctx.runtime
    await acreate_table_artifact(
        account.rows(), key=_key(runtime, "tokens"), description=f"Tokens of {_name(ctx)}"
    )


def _name(ctx: IterationContext) -> str:
    return f"iteration {iteration_number(ctx.index)} of {ctx.config.run.iterations}"


def _headline(metrics: dict[str, float], supervised: bool = False) -> str:
    """The figures of the iteration's log line."""
    line = SUPERVISED_LINE if supervised else LINE
    shown = [f"{label} {_figure(metrics[name])}" for label, name in line if name in metrics]
    for name, value in metrics.items():
        if name.startswith("eval/") and name.endswith("/reward_mean"):
            unscored = metrics.get(name.replace("/reward_mean", "/unscored"), 0)
            note = f" ({unscored:.0f} unscored, counted as wrong)" if unscored else ""
            shown.append(f"{name.split('/')[1]} {value:.3f}{note}")
        if name.startswith("eval/") and name.endswith("/loss"):
            perplexity = metrics[name.replace("/loss", "/perplexity")]
            shown.append(f"{name[5:-5]} loss {value:.4g} (perplexity {perplexity:.4g})")
    return ", ".join(shown)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


async def warn_without_gradient(ctx: IterationContext) -> None:
    """Warn if the rewards of the iteration give no gradient, with the query that shows why."""
    reason = await asyncio.to_thread(_without_gradient, ctx)
    if reason:
        run, root = ctx.config.run.name, shlex.quote(ctx.config.storage.root)
        query = REWARDS_BY_GROUP.format(iteration=iteration_number(ctx.index))
        log.warning(
            '%s has no gradient of its rewards: %s. Its rewards by group: millrace sql %s "%s" --root %s',
            *(_name(ctx), reason, run, query, root),
        )


def _without_gradient(ctx: IterationContext) -> str:
    """Why an iteration learns nothing from its rewards; empty if it does."""
    (advantages,) = ctx.folder.read_table("batch.parquet", "batch", columns=["advantage"]).itercolumns()
    largest = pc.max(pc.abs(advantages)).as_py()  # None where the trainer computes them by token
    if largest is not None and largest <= ZERO_VARIANCE:
        return f"all {len(advantages)} advantages are 0, as they are where the rewards of a group are equal"
    moved = any(step["grad_norm"] for step in ctx.records["train_step"]["steps"])
    return "" if moved else "the gradient norm of every step is 0"


async def evaluation(runtime: Runtime, record: EvaluateRecord) -> None:
    """Log an evaluation that belongs to no iteration."""
    await asyncio.to_thread(runtime.tracking.tracker.log_metrics, evaluation_metrics(record), record["done"])


def evaluation_metrics(record: EvaluateRecord) -> dict[str, float]:
    """Metrics of an evaluation, by name."""
    metrics: dict[str, float] = {}
    for name, result in record["sets"].items():
        parts = {
            name: result,
            **{f"{name}/{subset}": part for subset, part in result.get("subsets", {}).items()},
        }
        for path, part in parts.items():
            for figure, value in part.items():
                if isinstance(value, int | float):
                    metrics[f"eval/{path}/{figure}"] = value
            metrics |= {f"eval/{path}/pass_at_{k}": value for k, value in part.get("pass_at", {}).items()}
    return metrics


async def held_out_loss(runtime: Runtime, record: HeldOutRecord) -> None:
    """Log held-out losses that belong to no iteration."""
    metrics = held_out_metrics(record)
    log.info("before training: %s", _headline(metrics, supervised=True))
    await asyncio.to_thread(runtime.tracking.tracker.log_metrics, metrics, record["done"])


def held_out_metrics(record: HeldOutRecord) -> dict[str, float]:
    """Metrics of held-out losses, by name."""
    metrics: dict[str, float] = {}
    for name, result in record["sets"].items():
        for path, part in (
            (name, result),
            *((f"{name}/{key}", each) for key, each in result.get("subsets", {}).items()),
        ):
            for figure in ("loss", "perplexity", "tokens", "samples"):
                metrics[f"eval/{path}/{figure}"] = part[figure]
    return metrics


def _summary(ctx: IterationContext, metrics: dict[str, float]) -> str:
    lines = [f"# {ctx.config.run.name}: {_name(ctx)}", "", "| figure | value |", "|---|---|"]
    lines += [f"| {name} | {metrics[name]:.5g} |" for name in HEADLINES if name in metrics]
    lines += [
        f"| {name} | {value:.5g} |"
        for name, value in sorted(metrics.items())
        if name.startswith(("time/", "eval/"))
    ]
    return "\n".join(
        [*lines, "", f"Files: `{ctx.folder.url}`", f"MLflow: {ctx.runtime.tracking.tracker.url()}"]
    )


def _samples(ctx: IterationContext) -> list[dict[str, Any]]:
    columns = [
        "sample_id",
        "source",
        "prompt",
        "response",
        "label",
        "reward",
        "advantage",
        "status",
        "train_step",
    ]
    table = ctx.folder.read_table("batch.parquet", "batch", columns=columns)
    step = max(1, table.num_rows // ctx.config.tracking.samples)
    rows = table.take(list(range(0, table.num_rows, step))[: ctx.config.tracking.samples]).to_pylist()
    return [
        {name: value[:500] if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    ]


def _curve(runtime: Runtime) -> bytes:
    """Mean reward and held-out reward by iteration, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    history = runtime.tracking.tracker.history("reward/mean")
    axes.plot([step for step, _ in history], [value for _, value in history], label="training reward (mean)")
    for held_out in runtime.config.evaluation.sets:
        points = runtime.tracking.tracker.history(f"eval/{held_out.name}/reward_mean")
        axes.plot(
            [step for step, _ in points],
            [value for _, value in points],
            "o-",
            label=f"held-out: {held_out.name}",
        )
    axes.set_xlabel("iterations trained")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def _key(runtime: Runtime, what: str) -> str:
    """Key of an artifact of this run alone. Keys allow lower-case letters, digits and dashes only."""
    identity = runtime.run_folder.identity(runtime.run_id)
    return re.sub(r"[^a-z0-9-]", "-", f"{identity}-{what}")
