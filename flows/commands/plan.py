"""`millrace plan CONFIG --from RUN`: the time of an iteration under other layouts and pipelines, replayed from a run's record.

Reads only the run folder. flows/planning does the replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import typer

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.errors import ConfigError, StorageError
from millrace.flows.commands.listing import CsvOption, JsonOption, Listing, print_listing
from millrace.flows.commands.terminal import ConfigArgument, Overrides, RootOption, guarded, print_lines
from millrace.flows.driver.stored_run import run_record, settings_of
from millrace.flows.planning.compare import Machine, RecordedRun, calibrated, verdicts, ways
from millrace.flows.planning.pipeline import Mode, replay
from millrace.flows.planning.recorded import Group, RecordedRequest, Seconds, fit_speed

NEWEST = 20  # newest iterations that are read
LEAST = 2  # fewest iterations in a row under one driver
COLUMNS = (
    *("gpus", "layout", "ahead", "max_staleness", "select", "iteration_s"),
    *("trainer_idle", "engines_idle", "age_mean", "age_max"),
)
ROLLOUTS = ["group_id", "response_length", "engine_id", "timings"]


def plan(
    config: ConfigArgument,
    run: Annotated[str, typer.Option("--from", help="Run whose recorded iterations are replayed.")],
    overrides: Overrides = None,
    root: RootOption = "runs",
    json: JsonOption = False,
    csv: CsvOption = False,
) -> None:
    """Predict an iteration's time on shared and on split GPUs, synchronous and asynchronous, from a run's recorded times."""
    made = guarded(lambda: plan_from(load_config(str(config), overrides or []), root, run))
    print_listing(made.listing, json, csv)
    if not (json or csv):
        print_lines(made.verdicts)


@dataclass(frozen=True)
class ReplayedPlan:
    """The compared ways as a listing, and conclusions."""

    listing: Listing
    verdicts: list[str]


@dataclass(frozen=True)
class _Iteration:
    """One recorded iteration. span: seconds from the first request to the last answer."""

    groups: list[Group]
    requests: list[RecordedRequest]
    span: float
    seconds: Seconds
    iteration_s: float | None  # seconds since the previous manifest, by the same driver


def plan_from(config: RunConfig, root: str, run: str) -> ReplayedPlan:
    """Replay a run's iterations with the batch of `config`, on shared and on split GPUs.

    Raises StorageError if the run does not exist or has too few iterations; ConfigError for a run whose phases overlap or whose
    samples are no single answers.
    """
    record = run_record(root, run)
    recorded = recorded_run(RunConfig.model_validate(settings_of(record)), RunFolder(root, run))
    again = replay(recorded.groups, recorded.batch, recorded.layout, Mode())
    p = config.pipeline
    drain, recompute = p.on_update == "finish" and p.ahead > 0, p.on_update != "keep"
    wanted = Mode(p.ahead, p.staleness - p.sync_every + 1, p.select, p.reserve, drain, recompute)
    rows = list(ways(recorded, config.rollout.prompts, wanted))
    listed: list[Sequence[Any]] = [
        (
            *(row.gpus, row.layout, row.mode.ahead, row.mode.staleness, row.mode.select),
            *(round(row.outcome.iteration_s, 3), round(row.outcome.trainer_idle, 3)),
            *(round(row.outcome.engines_idle, 3), round(row.outcome.age_mean, 2), row.outcome.age_max),
        )
        for row in rows
    ]
    s, machine = recorded.seconds, recorded.machine
    facts = {
        "measured": f"{recorded.iteration_s:.2f} s an iteration, replayed {again.iteration_s:.2f} s",
        "recorded on": f"{machine.engines} engines of {machine.engine_gpus} GPUs, {machine.trainer_gpus} trainer ranks, "
        + ("shared" if machine.colocated else "apart"),
        "of it": f"training {s.train:.2f} s, sync {s.sync:.2f} s, checkpoints {s.checkpoint:.2f} s, evaluation "
        f"{s.evaluate:.2f} s, handing GPUs over {s.ready:.2f} s, no task {s.rest:.2f} s",
    }
    return ReplayedPlan(Listing(COLUMNS, listed, facts), verdicts(rows))


def recorded_run(config: RunConfig, folder: RunFolder) -> RecordedRun:
    """A run's record in the form of a replay's input.

    Leaves out the first two iterations of each driver, which import and compile, if enough others remain.
    """
    _check_plain(config, folder)
    done = folder.first_open_iteration()
    found = [_read(folder, index) for index in range(max(0, done - NEWEST), done)]
    steady = [each for each in found if each.iteration_s is not None]
    settled = [each for before, each in pairwise(found) if None not in (before.iteration_s, each.iteration_s)]
    if len(settled) >= LEAST:
        steady = settled
    if len(steady) < LEAST:
        raise StorageError(
            f"{len(steady)} iterations follow another one of the same driver",
            where=folder.store.url,
            remedy=f"plan from a run of at least {LEAST + 1} iterations in one go",
        )
    iteration_s = float(np.mean([each.iteration_s for each in steady]))
    means = {
        name: float(np.mean([getattr(each.seconds, name) for each in steady])) for name in vars(Seconds())
    }
    span = float(np.mean([each.span for each in steady]))
    means["rest"] = max(0.0, iteration_s - span - sum(means.values()))
    recorded = RecordedRun(
        groups=[group for each in steady for group in each.groups],
        batch=config.rollout.prompts,
        seconds=Seconds(**means),
        speed=fit_speed([request for each in steady for request in each.requests]),
        machine=Machine(
            engines=config.engines.count - config.engines.prefill,
            engine_gpus=max(1, config.engines.gpus),
            trainer_gpus=config.trainer.world_size,
            colocated=config.placement.colocate,
            places=config.rollout.max_concurrency,
        ),
        iteration_s=iteration_s,
    )
    return calibrated(recorded, span)


def _check_plain(config: RunConfig, folder: RunFolder) -> None:
    """Raise ConfigError unless its phases follow one another, and each sample is one answer."""
    reasons = {
        "algorithm.loss = sft": config.algorithm.supervised,
        "pipeline.rollouts_from": config.pipeline.rollouts_from is not None,
        "rollout.session": config.rollout.session is not None,
        "rollout.buffer": config.rollout.buffer is not None,
        f"pipeline.ahead = {config.pipeline.ahead}": config.pipeline.ahead > 0,
        "pipeline.eager": config.pipeline.eager,
        "pipeline.select = finish": config.pipeline.select == "finish",
        "evaluation.background": bool(config.evaluation.sets) and config.evaluates_in_background,
    }
    for where, holds in reasons.items():
        if holds:
            raise ConfigError(
                "a plan is made from a run whose samples are single answers and whose phases follow one another",
                where=f"{folder.store.url}: {where}",
                remedy="record a few iterations without it",
            )


def _read(folder: RunFolder, index: int) -> _Iteration:
    files = IterationFiles(folder, index)
    manifest, before = folder.manifest(index), folder.manifest(index - 1) if index else None
    assert manifest is not None, "it is committed"
    metrics, rollout = manifest.tasks["metrics"], files.record("rollout") or {}
    rows = files.read_parts("rollouts", ROLLOUTS).to_pylist()
    engines_s = float(rollout.get("engines_s", 0.0))
    times = [dict(row["timings"]) for row in rows]
    ready = min(time["started"] for time in times) + engines_s
    requests = [
        RecordedRequest(
            row["engine_id"],
            (max(time["started"], ready), max(time["started"] + time["generate_s"], ready)),
            row["response_length"],
        )
        for row, time in zip(rows, times, strict=True)
    ]
    span = max(request.interval[1] for request in requests) - ready
    verdict_rows = files.read_table("verdicts", ["group_id", "verdict"]).to_pylist()
    kept = {row["group_id"] for row in verdict_rows if row["verdict"] == "kept"}
    lengths: dict[str, list[int]] = {row["group_id"]: [] for row in verdict_rows}
    for row in rows:
        lengths[row["group_id"]].append(row["response_length"])
    trained = files.record("train_step") or {}
    handed = metrics.get("time/sync_offload_s", 0.0)
    handed += metrics.get("time/sync_wake_s", 0.0)
    taken = trained.get("rest_s", 0.0) + sum(step["seconds"]["reload"] for step in trained.get("steps", []))
    same = before and before.tasks.get("driver") == manifest.tasks.get("driver")
    return _Iteration(
        groups=[Group(tuple(each), name in kept) for name, each in lengths.items() if any(each)],
        requests=requests,
        span=span,
        seconds=Seconds(
            draw=metrics.get("time/sample_prompts_s", 0.0),
            ready=engines_s + taken + handed,
            score=max(
                0.0,
                max(metrics.get(f"time/{task}_s", 0.0) for task in ("rollout", "filter")) - span,
            ),
            train=metrics.get("time/train_step_s", 0.0) - taken,
            sync=metrics.get("time/sync_weights_s", 0.0) - handed,
            checkpoint=metrics.get("time/checkpoint_s", 0.0),
            evaluate=metrics.get("time/evaluate_s", 0.0),
        ),
        iteration_s=manifest.tasks["committed"] - before.tasks["committed"] if before and same else None,
    )
