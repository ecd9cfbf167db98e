"""Output for users: the curves in trackers, and the artifacts and log on Prefect's pages.

Owns their names and when they are sent; tasks/reporting makes their content. Artifact keys carry the run's identity, so each run
has its own artifacts, also beside one of its name under another storage root. Iterations count from 1.
"""

import asyncio
import base64
import logging
import re
import shlex
import time
from collections.abc import Mapping
from typing import cast

import httpx
from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    aupdate_progress_artifact,
)
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run

from millrace.connectors.mlflow.tracker import is_server
from millrace.connectors.prefect.run_page import RunPage
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.accounts.account import Account
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.task_records import EvaluateRecord, HeldOutRecord
from millrace.core.errors import of_run
from millrace.core.evaluation import evaluation_metrics, held_out_metrics
from millrace.core.periodic import due
from millrace.core.tracker import run_tags
from millrace.tasks.context import IterationContext
from millrace.tasks.reporting.pictures import curves_png, drawn
from millrace.tasks.reporting.sample_groups import samples_text
from millrace.tasks.reporting.texts import account_text, iteration_text, run_text
from millrace.tasks.reporting.traces import rollout_traces
from millrace.tasks.runtime.runtime import Runtime

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0  # between updates of a rollout's progress on its page
LINE_EVERY_S = 30.0  # between lines of a rollout's progress in the log
NOT_SHOWN = (httpx.HTTPError, PrefectException)  # errors of Prefect's server, which then shows nothing
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


async def open_tracking(runtime: Runtime, run_id: str | None) -> str | None:
    """Start or resume the run in its trackers, and show it on the page of the flow run; returns MLflow's id.

    run_id: of the MLflow run, as far as there is one.
    """
    config, tracking, folder = runtime.config, runtime.tracking, runtime.run_folder
    first = await asyncio.to_thread(folder.first_open_iteration)
    tracking.show_on(RunPage(str(flow_run.id)))
    mlflow_run_id = await tracking.start(
        folder.store.url, folder.identity(runtime.run_id), run_id, iteration_number(first) if first else 0
    )
    tags = {"prefect.flow_run_id": flow_run.id or "", "prefect.flow_run_url": flow_run.ui_url or ""}
    # MLflow's pages show it as the run's description
    tags["mlflow.note.content"] = _description(runtime)
    await asyncio.to_thread(tracking.describe, config.model_dump(mode="json"), tags)
    await asyncio.to_thread(_read_curves, runtime)
    await tracking.page.tag(run_tags(config))
    log.info(
        "run %s: %d of %d iterations are complete; its folder is %s",
        *(config.run.name, first, config.run.iterations, folder.store.url),
    )
    await _show_run(runtime, first)
    return mlflow_run_id


async def close_tracking(runtime: Runtime) -> None:
    """Show the run's final state, and mark it as finished."""
    await _show_run(runtime, runtime.config.run.iterations)
    log.info("run %s is complete: %d iterations", runtime.config.run.name, runtime.config.run.iterations)
    await asyncio.to_thread(runtime.tracking.finish)


async def iteration(ctx: IterationContext, metrics: dict[str, float]) -> None:
    """Log one iteration: metrics to the trackers, summary and curves to Prefect's pages."""
    runtime, config, number = ctx.runtime, ctx.config, iteration_number(ctx.index)
    line = f"{_name(ctx)}: {_headline(metrics, config.algorithm.supervised)}"
    log.info("%s", line)
    runtime.tracking.page.line(line)
    picture = await _picture(ctx, metrics) if _shows_curves(ctx) else None
    logged = runtime.tracking.log_metrics(metrics, number, picture)
    text = iteration_text(
        f"{config.run.name}: {_name(ctx)}",
        metrics,
        ctx.worked,
        runtime.tracking.curves,
        _links(runtime, ctx),
    )
    await asyncio.gather(
        logged,
        acreate_markdown_artifact(text, key=_key(runtime, "iteration"), description=_name(ctx).capitalize()),
        _show_run(runtime, number),
        *([_show_curves(runtime, picture, number)] if picture else []),
    )
    most = config.tracking.rollout_traces
    if most and not config.algorithm.supervised:
        files = IterationFiles(runtime.run_folder, ctx.index)
        view = f"{view_command(runtime.run_folder)}, at {iteration_page(runtime.run_folder, ctx.index)}"
        runtime.tracking.log_traces(lambda: rollout_traces(files, most), ctx.index, view)


def _shows_curves(ctx: IterationContext) -> bool:
    """Whether the iteration shows the picture of the curves: the last one, and iterations that save, if it is old."""
    number, config = iteration_number(ctx.index), ctx.config
    is_due = due(number, config.checkpoint.every) and ctx.runtime.tracking.picture_is_old()
    return is_due or number == config.run.iterations


async def _picture(ctx: IterationContext, metrics: Mapping[str, float]) -> bytes:
    """The picture of the curves up to this iteration."""
    curves = ctx.runtime.tracking.curves
    curves.add(metrics, iteration_number(ctx.index))
    return await drawn(curves_png, curves)


async def batch(ctx: IterationContext, account: Account) -> None:
    """Show some of the iteration's samples, and what became of its tokens, on its page."""
    about = f"Samples of {_name(ctx)}"
    systems = {source.name: source.system for source in ctx.config.data.sources if source.system}
    most = ctx.config.tracking.samples
    text = await asyncio.to_thread(samples_text, ctx.folder, about, most, systems) if most else ""
    tokens = account_text(account.rows())
    await acreate_markdown_artifact(
        f"{text}\n\n{tokens}", key=_key(ctx.runtime, "samples"), description=about
    )


async def _show_run(runtime: Runtime, done: int) -> None:
    """Show the run's progress, results and cost so far on its page."""
    config, tracking = runtime.config, runtime.tracking
    text = run_text(f"{config.run.name}: {done} of {config.run.iterations}", tracking.curves, _links(runtime))
    progress = 100 * done / config.run.iterations
    await asyncio.gather(
        tracking.page.show(_key(runtime, "progress"), "progress", progress, "Iterations complete"),
        tracking.page.show(_key(runtime, "run"), "markdown", text, f"The run {config.run.name} so far"),
    )


async def _show_curves(runtime: Runtime, picture: bytes, number: int) -> None:
    """Show the picture of the curves on the run's page."""
    image = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    await runtime.tracking.page.show(
        _key(runtime, "curves"), "image", image, f"Curves after iteration {number}"
    )


async def rollout_progress(ctx: IterationContext) -> None:
    """Show how many samples are generated while rollouts run, every few seconds; returns when the batch is filled.

    A short rollout shows nothing. An update that Prefect's server does not take is dropped: the next one follows soon.
    """
    shown_at, artifact, revision = time.monotonic(), None, 0
    logged_at = shown_at
    while not ctx.stream.settled:
        revision = await ctx.stream.wait(revision)
        if time.monotonic() - shown_at < PROGRESS_EVERY_S:
            continue
        shown_at = time.monotonic()
        made = sum(file["rows"] or 0 for file in ctx.parts["rollouts"])
        wanted = ctx.stream.released * ctx.config.rollout.samples_per_prompt
        percent, about = (
            100 * min(1.0, made / max(wanted, 1)),
            f"{made} samples of {_name(ctx)}, {wanted} asked for",
        )
        if shown_at - logged_at >= LINE_EVERY_S:
            log.info("%s: %d of %d samples", _name(ctx), made, wanted)
            logged_at = shown_at
        try:
            if artifact is None:
                artifact = await acreate_progress_artifact(
                    percent, key=_key(ctx.runtime, "rollout"), description=about
                )
            else:
                await aupdate_progress_artifact(artifact, progress=percent, description=about)
        except NOT_SHOWN as error:
            log.warning("the progress of %s is not shown: %s", _name(ctx), error)
    if artifact is not None:
        await aupdate_progress_artifact(artifact, progress=100.0, description=f"Rollout of {_name(ctx)}")


def _read_curves(runtime: Runtime) -> None:
    """Read the metrics of iterations of earlier drivers, and of the evaluation before training."""
    runtime.tracking.curves.read(runtime.run_folder)
    files = IterationFiles(runtime.run_folder, 0)
    if evaluated := files.record("evaluate_before"):
        runtime.tracking.curves.add(evaluation_metrics(cast(EvaluateRecord, evaluated)), 0)
    if held_out := files.record("held_out_loss_before"):
        runtime.tracking.curves.add(held_out_metrics(cast(HeldOutRecord, held_out)), 0)


def _description(runtime: Runtime) -> str:
    """A run's model, data and folder as Markdown."""
    config = runtime.config
    learns = "supervised" if config.algorithm.supervised else f"preset {config.algorithm.preset}"
    sources = ", ".join(f"`{source.name}`" for source in config.data.sources)
    lines = [
        f"model `{config.model.path}`",
        f"data {sources}",
        learns,
        f"files `{runtime.run_folder.store.url}`",
        f"samples {samples_page(runtime.run_folder)}",
    ]
    if flow_run.ui_url:
        lines.append(f"[flow run in Prefect]({flow_run.ui_url})")
    return "  \n".join(lines)


def _links(runtime: Runtime, ctx: IterationContext | None = None) -> dict[str, str]:
    """Links to more about a run, or about one of its iterations."""
    files = ctx.folder.url if ctx else runtime.run_folder.store.url
    links = {"files": f"`{files}`", "samples": samples_page(runtime.run_folder, ctx.index if ctx else None)}
    for name, link in runtime.tracking.links().items():
        links[name] = f"{link}{_hint(runtime, name)}"
    return links


def view_command(run: RunFolder) -> str:
    """The command that serves a run's page of samples."""
    return f"millrace view {of_run(run.name, run.store.url)}"


def samples_page(run: RunFolder, index: int | None = None) -> str:
    """The command that shows a run's samples, and the address of an iteration on its page."""
    command = f"`{view_command(run)}`"
    return command if index is None else f"{command}, at `{iteration_page(run, index)}`"


def iteration_page(run: RunFolder, index: int) -> str:
    """The address of an iteration on the page of samples."""
    return f"/{run.name}/{iteration_number(index)}"


def _hint(runtime: Runtime, name: str) -> str:
    """How to start the server of a tracker's page; empty if it has a server."""
    mlflow = runtime.tracking.mlflow
    if name == "mlflow" and mlflow and not is_server(mlflow.uri):
        return "; `millrace ui` starts the server of this page"
    return ""


def _name(ctx: IterationContext) -> str:
    return f"iteration {iteration_number(ctx.index)} of {ctx.config.run.iterations}"


def _headline(metrics: dict[str, float], supervised: bool = False) -> str:
    """The metrics of the iteration's log line."""
    line = SUPERVISED_LINE if supervised else LINE
    shown = [f"{label} {_shown(name, metrics)}" for label, name in line if name in metrics]
    for name, value in metrics.items():
        if name.startswith("eval/") and name.endswith("/reward_mean"):
            unscored = metrics.get(name.replace("/reward_mean", "/unscored"), 0)
            note = f" ({unscored:.0f} unscored, counted as wrong)" if unscored else ""
            shown.append(f"{name.removeprefix('eval/').removesuffix('/reward_mean')} {value:.3f}{note}")
        if name.startswith("eval/") and name.endswith("/loss"):
            perplexity = metrics[name.replace("/loss", "/perplexity")]
            shown.append(f"{name[5:-5]} loss {value:.4g} (perplexity {perplexity:.4g})")
    return ", ".join(shown)


def _shown(name: str, metrics: dict[str, float]) -> str:
    if name == "train/logprob_gap_mean" and metrics.get("train/logprob_gap_share") == 0:
        # all tokens are of older weights
        return "not measured"
    return _figure(metrics[name])


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def warn_without_gradient(ctx: IterationContext, without_advantage: int | None) -> None:
    """Warn if the rewards of the iteration give no gradient, with the query that shows why.

    without_advantage: samples of its batch, if the advantages of all are 0.
    """
    reason = _without_gradient(ctx, without_advantage)
    if reason:
        run, root = ctx.config.run.name, shlex.quote(ctx.config.storage.root)
        query = REWARDS_BY_GROUP.format(iteration=iteration_number(ctx.index))
        log.warning(
            '%s has no gradient of its rewards: %s. Its rewards by group: millrace sql %s "%s" --root %s',
            *(_name(ctx), reason, run, query, root),
        )


def _without_gradient(ctx: IterationContext, without_advantage: int | None) -> str:
    """Why an iteration has no gradient from its rewards; empty if it has one."""
    if without_advantage is not None:
        return f"all {without_advantage} advantages are 0, as they are where the rewards of a group are equal"
    if ctx.config.pipeline.rollouts_only:
        return ""
    moved = any(step["grad_norm"] for step in ctx.records["train_step"]["steps"])
    return "" if moved else "the gradient norm of every step is 0"


async def evaluation(runtime: Runtime, record: EvaluateRecord) -> None:
    """Log an evaluation that ran outside of the iteration that made its weights."""
    metrics, done = evaluation_metrics(record), record["done"]
    log.info("%s: %s", f"after iteration {done}" if done else "before training", _headline(metrics))
    await runtime.tracking.log_metrics(metrics, done)


async def held_out_loss(runtime: Runtime, record: HeldOutRecord) -> None:
    """Log held-out losses that belong to no iteration."""
    metrics = held_out_metrics(record)
    log.info("before training: %s", _headline(metrics, supervised=True))
    await runtime.tracking.log_metrics(metrics, record["done"])


def _key(runtime: Runtime, what: str) -> str:
    """Key of an artifact of this run alone. Keys allow lower-case letters, digits and dashes only."""
    identity = runtime.run_folder.identity(runtime.run_id)
    return re.sub(r"[^a-z0-9-]", "-", f"{identity}-{what}")
