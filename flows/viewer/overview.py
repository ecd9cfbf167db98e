"""A run at a glance: where it is, its curves, what became of its tokens, when it worked, and runs side by side.

Reads manifests and small records alone, and of samples the narrow columns that a timeline needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.core.accounts.account import FATES
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import MissingFileError, StorageError
from millrace.core.tracker import flat
from millrace.flows.commands.runs import state_of
from millrace.flows.commands.show import SPEED
from millrace.flows.driver.stored_run import evaluations
from millrace.flows.viewer.stored import NotShown, Problems, ViewedRun

CURVES = {
    "reward": "reward/mean",
    "length": "rollout/response_length_mean",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "entropy": "train/entropy",
    "gap": "train/logprob_gap_mean",
    "staleness": "staleness/mean",
    "tokens/s": "rollout/tokens_per_second",
    **SPEED,
    "KV use": "rollout/kv_used_max",
    "queue": "rollout/queue_max",
    "dropped": "filter/groups_dropped",
    "zero variance": "filter/zero_variance_share",
    "seconds": "time/iteration_s",
}
PHASE = re.compile(r"^time/(?!iteration_s)(?!sync_(?!weights_s))(\w+)_s$")
INTERVALS = 20_000  # of engines' answers in a timeline, at most


@dataclass(frozen=True)
class IterationLine:
    """An iteration in the run's table. figures: of `CURVES`. phases: seconds by task."""

    iteration: int
    committed: bool
    figures: dict[str, float]
    phases: dict[str, float]
    dropped: dict[str, int]  # groups by what dropped them


@dataclass(frozen=True)
class Overview:
    """A run: facts, a line an iteration, curves, held-out sets and the account of its tokens."""

    run: str
    facts: dict[str, str]
    iterations: list[IterationLine]
    curves: dict[str, list[tuple[int, float]]]
    names: list[str]  # of all figures
    held_out: dict[str, list[tuple[int, float]]]  # by set: iterations trained, and the mean
    tokens: dict[str, int]  # generated, and by fate
    problems: list[NotShown]


def overview(run: ViewedRun) -> Overview:
    """The run as far as it is stored."""
    problems = Problems(dict(run.problems.found))
    committed = [run.committed[index] for index in sorted(run.committed)]
    lines = [
        IterationLine(
            iteration=iteration_number(item.iteration),
            committed=True,
            figures={name: item.metrics[key] for name, key in CURVES.items() if key in item.metrics},
            phases=_phases(item.metrics),
            dropped=_dropped(item.metrics),
        )
        for item in committed
    ]
    opened = [index for index in run.numbers() if index not in run.committed]
    lines += [IterationLine(iteration_number(index), False, {}, {}, {}) for index in opened]
    lines.sort(key=lambda line: line.iteration)
    return Overview(
        run=run.name,
        facts=_facts(run, problems),
        iterations=lines,
        curves={name: figure(run, key) for name, key in CURVES.items()},
        names=sorted({name for item in committed for name in item.metrics}),
        held_out=_held_out(run, problems),
        tokens=tokens_of([item.metrics for item in committed]),
        problems=problems.listed(),
    )


def figure(run: ViewedRun, name: str) -> list[tuple[int, float]]:
    """A figure by iteration, from 1."""
    return [
        (iteration_number(index), run.committed[index].metrics[name])
        for index in sorted(run.committed)
        if name in run.committed[index].metrics
    ]


def tokens_of(metrics: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Tokens that were generated, and what became of them, over iterations."""
    names = ("generated", *(fate for fate in FATES if fate != "in flight"))
    return {name: int(sum(each.get(f"tokens/{name}", 0) for each in metrics)) for name in names}


def _phases(metrics: Mapping[str, float]) -> dict[str, float]:
    return {match[1]: value for name, value in metrics.items() if (match := PHASE.match(name))}


def _dropped(metrics: Mapping[str, float]) -> dict[str, int]:
    prefix = "filter/dropped_"
    return {
        name.removeprefix(prefix): int(value)
        for name, value in metrics.items()
        if name.startswith(prefix) and value
    }


def _facts(run: ViewedRun, problems: Problems) -> dict[str, str]:
    facts = {"folder": run.folder.store.url, "iterations": str(len(run.committed))}
    if not run.record:
        return facts
    settings = run.settings
    try:
        facts["state"] = state_of(run.folder.store, run.record)
        facts["checkpoints"] = ", ".join(map(str, run.folder.complete_checkpoints())) or "none"
    except StorageError as error:
        problems.note(error)
    facts["iterations"] = f"{len(run.committed)} of {settings['run']['iterations']}"
    facts["model"] = str(settings["model"]["path"])
    facts["data"] = ", ".join(str(source["name"]) for source in settings["data"]["sources"])
    if preset := settings["algorithm"].get("preset"):
        facts["preset"] = str(preset)
    if revision := run.record.get("code_revision"):
        facts["code"] = str(revision)
    for attempt in run.record["attempts"][-1:]:
        if ended := attempt.get("ended", {}).get("error"):
            facts["error"] = str(ended)
        facts["Prefect"] = str(attempt.get("flow_run_url"))
    if tracked := run.record.get("mlflow_run_id"):
        facts["MLflow run"] = str(tracked)
    return facts


def _held_out(run: ViewedRun, problems: Problems) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    try:
        by_done = evaluations(run.folder, run.committed.values())
    except StorageError as error:
        problems.note(error)
        return found
    for done, values in sorted(by_done.items()):
        for name, value in values.items():
            found.setdefault(name, []).append((done, value))
    return found


@dataclass(frozen=True)
class Interval:
    """Something that worked for a time. start, end: seconds of the epoch. lane: who worked."""

    lane: str
    what: str
    start: float
    end: float
    iteration: int | None = None
    version: int | None = None


@dataclass(frozen=True)
class Timeline:
    """Recorded intervals of some iterations. left_out: answers of engines that are not listed."""

    intervals: list[Interval]
    left_out: int
    without: list[int]  # iterations whose tasks have durations alone
    problems: list[NotShown]


def timeline(run: ViewedRun, indices: Iterable[int]) -> Timeline:
    """When drivers, tasks and engines worked in these iterations, as far as it is recorded."""
    problems = Problems()
    found = [*_attempts(run)]
    without: list[int] = []
    left_out = 0
    for index in indices:
        try:
            iteration = run.iteration(index)
        except StorageError as error:
            problems.note(error)
            continue
        manifest = iteration.files.manifest
        worked = manifest.tasks.get("worked", {}) if manifest else {}
        if manifest and not worked:
            without.append(iteration.number)
        found += [
            Interval(_lane(task), task, start, end, iteration.number) for task, (start, end) in worked.items()
        ]
        columns = ("engine_id", "timings", "policy_versions")
        entries = iteration.of_kind("rollouts")
        for _, _, table in iteration.tables.groups(entries, "rollouts", columns, failed=problems.note):
            for row in table.to_pylist():
                times = dict(row["timings"])
                if "started" not in times:
                    continue
                if len(found) >= INTERVALS:
                    left_out += 1
                    continue
                end = times["started"] + times.get("generate_s", 0.0)
                versions = [span["version"] for span in row["policy_versions"]]
                found.append(
                    Interval(
                        *(row["engine_id"] or "no engine", "answer", times["started"], end, iteration.number),
                        version=versions[0] if versions else None,
                    )
                )
    return Timeline(sorted(found, key=lambda each: each.start), left_out, without, problems.listed())


def _attempts(run: ViewedRun) -> list[Interval]:
    """Starts of the driver; a start that has not ended is a moment."""
    found = []
    for attempt in run.record.get("attempts", ()):
        start = datetime.fromisoformat(attempt["started"]).timestamp()
        ended = attempt.get("ended", {}).get("at")
        end = datetime.fromisoformat(ended).timestamp() if ended else start
        found.append(Interval("driver", f"start {attempt.get('number', '')}".strip(), start, end))
    return found


def _lane(task: str) -> str:
    lanes = {"train_step": "trainer", "eager_passes": "trainer", "trainer": "trainer", "sync_weights": "sync"}
    return lanes.get(task, "checkpoint" if task == "checkpoint" else "driver")


@dataclass(frozen=True)
class ComparedRuns:
    """Runs side by side. points: by run: iteration, tokens generated until then, hours until then, value."""

    name: str
    points: dict[str, list[tuple[int, float, float, float]]]
    differs: dict[str, dict[str, Any]]  # configuration fields that differ: value by run
    names: list[str]  # of all figures that any of the runs has


def compared(runs: Sequence[ViewedRun], name: str) -> ComparedRuns:
    """A figure of several runs, by iteration, by tokens and by hours of work, and what differs in their configuration."""
    settings = {run.name: dict(flat(run.settings)) for run in runs}
    fields = sorted({field for values in settings.values() for field in values})
    differs = {
        field: {run: values.get(field) for run, values in settings.items()}
        for field in fields
        if len({repr(values.get(field)) for values in settings.values()}) > 1
    }
    names = sorted({key for run in runs for item in run.committed.values() for key in item.metrics})
    return ComparedRuns(name, {run.name: _points(run, name) for run in runs}, differs, names)


def _points(run: ViewedRun, name: str) -> list[tuple[int, float, float, float]]:
    found = []
    tokens = seconds = 0.0
    for index in sorted(run.committed):
        metrics = run.committed[index].metrics
        tokens += metrics.get("tokens/generated", metrics.get("train/tokens", 0.0))
        seconds += metrics.get("time/iteration_s", 0.0)
        if name in metrics:
            found.append((iteration_number(index), tokens, seconds / 3600, metrics[name]))
    return found


@dataclass(frozen=True)
class Step:
    """The optimizer step that made a weight version. figures: of step.json."""

    version: int
    iteration: int
    figures: dict[str, float]
    samples: int  # that it trained
    generated_by: dict[int, int]  # these samples by the weight version that generated their first token
    checkpoint: str | None  # the first with its weights
    problems: list[NotShown]


def iteration_of_step(run: ViewedRun, version: int) -> int:
    """The index of the iteration whose step made a weight version. Raises MissingFileError if none did."""
    for index in sorted(run.committed):
        newest = run.committed[index].metrics.get("train/version")
        if newest is not None and newest >= version > 0:
            return index
    raise MissingFileError(
        "no committed step made it",
        where=f"weight version {version}",
        remedy="version 0 is the model before training",
    )


def step_figures(run: ViewedRun, index: int, version: int, problems: Problems) -> dict[str, float]:
    """The figures of a step, as step.json of its iteration has them."""
    files: IterationFiles = run.iteration(index).files
    try:
        steps = files.read_json("step.json")["steps"]
    except StorageError as error:
        problems.note(error)
        return {}
    return {
        name: value
        for step in steps
        if step["version"] == version
        for name, value in step.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
