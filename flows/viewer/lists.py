"""What an iteration's page lists: its groups in pages, the scatter of reward and length, notable samples, counts of what was dropped.

Also the samples of a step and where a sample came from and went. Works on figures alone; texts are read one sample at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from millrace.core.errors import ConfigError
from millrace.flows.viewer.index import SampleTable, SampleTables
from millrace.flows.viewer.overview import Step, iteration_of_step, step_figures
from millrace.flows.viewer.stored import NotShown, Problems, ViewedRun

PAGE = 50  # groups or samples
BEFORE, MOST_UNUSUAL = 20, 12  # iterations that say what is usual; figures that are shown
POINTS = 3000  # of a scatter; more samples are counted in cells
ACROSS, DOWN = 90, 45  # cells
ORDERS = {
    "drawn": "ordinal NULLS LAST, group_id",
    "reward": "reward DESC NULLS LAST, ordinal, group_id",
    "worst": "reward NULLS LAST, ordinal, group_id",
    "spread": "spread DESC NULLS LAST, ordinal, group_id",
    "length": "length DESC NULLS LAST, ordinal, group_id",
}
SHOWN = {
    "all": "true",
    "kept": "kept > 0",
    "dropped": "kept = 0 AND verdict = 'dropped'",
    "zero variance": "samples > 1 AND spread = 0",
    "not scored": "unscored > 0",
}
GROUPS = """
SELECT group_id, any_value(source) AS source, min(ordinal) AS ordinal, count(*) AS samples,
  count(*) FILTER (verdict = 'kept') AS kept, coalesce(avg(reward), any_value(group_reward)) AS reward, min(reward) AS least, max(reward) AS most,
  max(reward) - min(reward) AS spread, avg(length) AS length, max(length) AS longest,
  count(*) FILTER (reward IS NULL) AS unscored, any_value(verdict) AS verdict, any_value(reason) AS reason,
  any_value(dropped_by) AS dropped_by, min(version) AS version, any_value(reused_from) AS reused_from
FROM samples GROUP BY group_id
"""
# the answer that a reward found is the label's, yet the reward is not the best: or the other way round
NOTABLE = {
    "best": "reward IS NOT NULL ORDER BY reward DESC, length, sample_id",
    "worst": "reward IS NOT NULL ORDER BY reward, length DESC, sample_id",
    "longest": "length IS NOT NULL ORDER BY length DESC, sample_id",
    "shortest": "length > 0 ORDER BY length, sample_id",
    "failed": "status = 'failed' OR scoring IN ('failed', 'timed_out') ORDER BY sample_id",
    "rewarded, another answer": "reward > 0 AND answer IS NOT NULL AND label IS NOT NULL AND answer <> trim(label, '\"') "
    "ORDER BY reward DESC, sample_id",
}
MEDIAN = """
SELECT sample_id, reward, length FROM samples WHERE reward IS NOT NULL
ORDER BY abs(reward - (SELECT median(reward) FROM samples)), abs(length - (SELECT median(length) FROM samples)), sample_id LIMIT 5
"""


@dataclass(frozen=True)
class Unusual:
    """A figure that is far from what it was in the iterations before. usual: its median there."""

    name: str
    value: float
    usual: float


@dataclass(frozen=True)
class IterationView:
    """An iteration's page."""

    iteration: int
    committed: bool
    samples: int
    unused: int  # groups that were drawn in reserve and given back
    metrics: dict[str, float]
    unusual: list[Unusual]
    groups: list[dict[str, Any]]
    groups_found: int
    page: int
    verdicts: list[dict[str, Any]]  # samples and groups by verdict and reason
    notable: dict[str, list[dict[str, Any]]]
    points: (
        list[dict[str, Any]] | None
    )  # reward, length, sample and verdict of each; None if there are more than POINTS
    cells: list[dict[str, Any]] | None  # samples by cell, with one of them
    bounds: dict[str, float]
    partial: bool
    problems: list[NotShown]


def iteration_view(
    run: ViewedRun,
    tables: SampleTables,
    index: int,
    *,
    order: str = "drawn",
    shown: str = "all",
    page: int = 0,
    whole: bool = False,
) -> IterationView:
    """An iteration. order, shown: of the list of groups. whole: with figures of dropped samples, whatever it takes.

    Raises ConfigError for an unknown order or choice, MissingFileError if the iteration has not started.
    """
    for name, value, known in (("order", order, ORDERS), ("shown", shown, SHOWN)):
        if value not in known:
            raise ConfigError(f"unknown: {value}", where=name, remedy=f"give one of {', '.join(known)}")
    table = tables.of(index, whole)
    iteration = run.iteration(index)
    groups, found = _page(table, f"({GROUPS}) WHERE {SHOWN[shown]} ORDER BY {ORDERS[order]}", page)
    points, cells, bounds = _scatter(table)
    committed = run.committed.get(index)
    return IterationView(
        iteration=iteration.number,
        committed=iteration.committed,
        samples=table.count,
        unused=table.unused,
        metrics=dict(committed.metrics) if committed else {},
        unusual=_unusual(run, index),
        groups=groups,
        groups_found=found,
        page=page,
        verdicts=_verdicts(table),
        notable=_notable(table),
        points=points,
        cells=cells,
        bounds=bounds,
        partial=table.partial,
        problems=[*run.problems.listed(), *table.problems],
    )


def _unusual(run: ViewedRun, index: int) -> list[Unusual]:
    """Figures that differ most from the `BEFORE` iterations before, measured by how much they varied there; the largest first."""
    earlier = [run.committed[each].metrics for each in sorted(run.committed) if each < index][-BEFORE:]
    found: list[tuple[float, Unusual]] = []
    for name, value in run.committed[index].metrics.items() if index in run.committed else ():
        if not (values := [each[name] for each in earlier if name in each]):
            continue
        usual = median(values)
        varied = median(abs(each - usual) for each in values)
        if value != usual:
            # where nothing varied yet, a hundredth of the figure counts as usual
            distance = abs(value - usual) / (varied + abs(usual) / 100 + 1e-12)
            found.append((distance, Unusual(name, value, usual)))
    return [each for _, each in sorted(found, key=lambda pair: (-pair[0], pair[1].name))[:MOST_UNUSUAL]]


def _verdicts(table: SampleTable) -> list[dict[str, Any]]:
    return table.ask(
        "SELECT verdict, reason, dropped_by, count(*) AS samples, count(DISTINCT group_id) AS groups, "
        "min(group_id) AS example FROM samples GROUP BY ALL ORDER BY samples DESC LIMIT 40"
    )


def _notable(table: SampleTable) -> dict[str, list[dict[str, Any]]]:
    found = {
        name: table.ask(f"SELECT sample_id, reward, length, answer FROM samples WHERE {rule} LIMIT 5")
        for name, rule in NOTABLE.items()
    }
    return {"median": table.ask(MEDIAN), **found}


def _scatter(
    table: SampleTable,
) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]] | None, dict[str, float]]:
    (bounds,) = table.ask(
        "SELECT min(reward) AS least, max(reward) AS most, max(length) AS longest FROM samples WHERE reward IS NOT NULL"
    )
    known = {name: float(str(value)) for name, value in bounds.items() if value is not None}
    if table.count <= POINTS:
        points = table.ask("SELECT sample_id, reward, length, verdict FROM samples WHERE reward IS NOT NULL")
        return points, None, known
    cells = table.ask(
        "SELECT least(floor(length * ? / greatest(?, 1)), ? - 1)::INT AS x, "
        "least(floor((reward - ?) * ? / greatest(? - ?, 1e-9)), ? - 1)::INT AS y, count(*) AS samples, "
        "count(*) FILTER (verdict = 'kept') AS kept, min(sample_id) AS sample_id "
        "FROM samples WHERE reward IS NOT NULL AND length IS NOT NULL GROUP BY x, y",
        [
            *(ACROSS, known.get("longest", 1), ACROSS),
            *(known.get("least", 0), DOWN, known.get("most", 1), known.get("least", 0), DOWN),
        ],
    )
    return None, cells, {**known, "across": ACROSS, "down": DOWN}


@dataclass(frozen=True)
class SampleList:
    """Some samples by their figures. found: all that there are."""

    samples: list[dict[str, Any]]
    found: int


def samples_where(table: SampleTable, rule: str, values: list[object], page: int = 0) -> SampleList:
    """The samples that fit a rule in SQL. rule: of this module alone, never of a user."""
    return SampleList(*_page(table, f"samples WHERE {rule} ORDER BY ordinal, sample_id", page, values))


def _page(
    table: SampleTable, what: str, page: int, values: Sequence[object] = ()
) -> tuple[list[dict[str, Any]], int]:
    """A page of rows, and how many there are. what: a query after FROM, with its order."""
    rows = table.ask(
        f"SELECT *, count(*) OVER () AS found FROM {what} LIMIT {PAGE} OFFSET {PAGE * max(page, 0)}", values
    )
    found = [row.pop("found") for row in rows][:1] or [0]
    assert isinstance(found[0], int)
    return rows, found[0]


def step_view(run: ViewedRun, tables: SampleTables, version: int, page: int = 0) -> tuple[Step, SampleList]:
    """A step and the samples that it trained. Raises MissingFileError if no committed step made the version."""
    index, problems = iteration_of_step(run, version), Problems()
    table = tables.of(index)
    listed = samples_where(table, "verdict = 'kept' AND train_step = ?", [version], page)
    versions = table.ask(
        "SELECT version, count(*) AS samples FROM samples WHERE verdict = 'kept' AND train_step = ? AND version IS NOT NULL "
        "GROUP BY version ORDER BY version",
        [version],
    )
    saved = [done for done in run.folder.complete_checkpoints() if done > index]
    step = Step(
        version=version,
        iteration=index + 1,
        figures=step_figures(run, index, version, problems),
        samples=listed.found,
        generated_by={int(str(row["version"])): int(str(row["samples"])) for row in versions},
        checkpoint=run.folder.checkpoint_path(saved[0]) if saved else None,
        problems=[*problems.listed(), *table.problems],
    )
    return step, listed


@dataclass(frozen=True)
class Lineage:
    """Where a sample came from and what it went into."""

    sample: str
    drawn: dict[str, Any]  # source, row, epoch, ordinal
    versions: list[
        dict[str, int]
    ]  # weight versions that generated it, each with the iteration whose step made it
    verdict: str | None
    reason: str | None
    trained: list[dict[str, int]]  # steps that it was trained in, each with its iteration
    reused_from: int | None


def lineage(run: ViewedRun, tables: SampleTables, index: int, sample: str) -> Lineage:
    """The lineage of a sample. Raises MissingFileError if the iteration has not started."""
    table = tables.of(index)
    rows = table.ask("SELECT * FROM samples WHERE sample_id = ?", [sample])
    row = rows[0] if rows else {}
    iteration = run.iteration(index)
    columns = ("group_id", "source", "row", "epoch", "ordinal", "prompt_id")
    drawn: dict[str, Any] = {}
    for _, _, prompts in iteration.tables.groups(iteration.of_kind("prompts"), "prompts", columns):
        ids = prompts.column("group_id").to_pylist()
        if row.get("group_id") in ids:
            drawn = prompts.slice(ids.index(row["group_id"]), 1).to_pylist()[0]
    trained = []
    if isinstance(step := row.get("train_step"), int) and row.get("verdict") == "kept":
        trained.append({"version": step, "iteration": index + 1})
    for later in sorted(run.committed):
        history = run.committed[later].history
        origin = int(str(row["reused_from"])) - 1 if row.get("reused_from") is not None else index
        if history and later != index and drawn.get("ordinal") in history.reused.get(origin, ()):
            again = tables.of(later).ask("SELECT train_step FROM samples WHERE sample_id = ?", [sample])
            trained += [
                {"version": int(str(each["train_step"])), "iteration": later + 1}
                for each in again
                if each["train_step"]
            ]
    versions = []
    if isinstance(version := row.get("version"), int):
        made = iteration_of_step(run, version) + 1 if 0 < version <= _newest(run) else 0
        versions.append({"version": version, "iteration": made})
    reused = row.get("reused_from")
    return Lineage(
        sample=sample,
        drawn=drawn,
        versions=versions,
        verdict=str(row["verdict"]) if row.get("verdict") else None,
        reason=str(row["reason"]) if row.get("reason") else None,
        trained=trained,
        reused_from=int(str(reused)) if reused is not None else None,
    )


def _newest(run: ViewedRun) -> float:
    return max((item.metrics.get("train/version", 0) for item in run.committed.values()), default=0)
