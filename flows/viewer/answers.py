"""What the page may ask for, by name: the same answers for the server and for a file that is exported.

An answer is a value that becomes JSON: texts, numbers, lists, mappings and dataclasses of these. Iterations count from 1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from millrace.connectors.storage.run_folder import RECORD
from millrace.connectors.storage.store import Store
from millrace.core.errors import ConfigError, MissingFileError
from millrace.flows.commands.ledger import accounts_of_run
from millrace.flows.commands.sql import answer as sql_answer
from millrace.flows.viewer import held_out, lists, overview
from millrace.flows.viewer.index import SampleTables
from millrace.flows.viewer.samples import Samples
from millrace.flows.viewer.stored import Problems, ViewedRun

ROWS = 1000  # of an answer of SQL
SQL_S = 30.0
CELL = 2000  # characters of a cell of SQL


@dataclass(frozen=True)
class OpenRun:
    """A run with what is kept in memory of it."""

    run: ViewedRun
    tables: SampleTables
    samples: Samples

    @classmethod
    def of(cls, root: str, name: str) -> OpenRun:
        """Raises StorageError if there is no such run."""
        run = ViewedRun(root, name)
        tables = SampleTables(run)
        return cls(run, tables, Samples(run, tables))


class Question:
    """The parameters of a question. Each is a text; a number that is none raises ConfigError."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        return self._values.get(name, default)

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if value is None or not value.isascii() or not value.isdecimal() or len(value) > 9:
            raise ConfigError("is no number", where=f"{name} = {value}", remedy="give a whole number")
        return int(value)

    def index(self) -> int:
        """The iteration, counted from 0."""
        number = self.number("iteration")
        if number < 1:
            raise ConfigError("counts from 1", where="iteration", remedy="give 1 or more")
        return number - 1


Answer = Callable[[OpenRun, Question], Any]


def _overview(of: OpenRun, asked: Question) -> Any:
    of.run.refresh()
    return overview.overview(of.run)


def _figure(of: OpenRun, asked: Question) -> Any:
    return {"name": asked.text("name"), "points": overview.figure(of.run, asked.text("name"))}


def _iteration(of: OpenRun, asked: Question) -> Any:
    return lists.iteration_view(
        of.run,
        of.tables,
        asked.index(),
        order=asked.text("order", "drawn"),
        shown=asked.text("shown", "all"),
        page=asked.number("page", 0),
        whole=asked.text("whole") == "1",
    )


def _group(of: OpenRun, asked: Question) -> Any:
    return of.samples.group(asked.index(), asked.text("group"))


def _sample(of: OpenRun, asked: Question) -> Any:
    return of.samples.sample(asked.index(), asked.text("sample"))


def _tokens(of: OpenRun, asked: Question) -> Any:
    return of.samples.tokens(asked.index(), asked.text("sample"), asked.number("first", 0))


def _turns(of: OpenRun, asked: Question) -> Any:
    return of.samples.branches(asked.index(), asked.text("sample"))


def _lineage(of: OpenRun, asked: Question) -> Any:
    return lists.lineage(of.run, of.tables, asked.index(), asked.text("sample"))


def _step(of: OpenRun, asked: Question) -> Any:
    step, samples = lists.step_view(of.run, of.tables, asked.number("version"), asked.number("page", 0))
    return {"step": step, "samples": samples}


def _account(of: OpenRun, asked: Question) -> Any:
    """The account of an iteration, counted again from its samples; of the run, from what the iterations recorded."""
    if asked.text("iteration"):
        accounts = accounts_of_run(of.run.root, of.run.name, asked.index() + 1)
        listing = accounts.listing
        rows = [dict(zip(listing.columns, row, strict=True)) for row in listing.rows]
        return {"facts": listing.facts, "rows": rows, "problems": accounts.problems}
    lines = [
        {"iteration": index + 1, **overview.tokens_of([of.run.committed[index].metrics])}
        for index in sorted(of.run.committed)
    ]
    return {"facts": {}, "rows": lines, "problems": []}


def _timeline(of: OpenRun, asked: Question) -> Any:
    last = max(of.run.numbers(), default=0) + 1
    until = min(asked.number("last", last), last)
    since = max(asked.number("first", max(1, until - 2)), 1)
    return overview.timeline(of.run, range(since - 1, until))


def _evaluations(of: OpenRun, asked: Question) -> Any:
    problems = Problems()
    return {"sets": held_out.evaluated_at(of.run, problems), "problems": problems.listed()}


def _evaluation(of: OpenRun, asked: Question) -> Any:
    other = asked.number("other") if asked.text("other") else None
    changed = asked.text("changed") == "1"
    return held_out.held_out(
        of.run, asked.text("set"), asked.number("done"), other, asked.number("page", 0), changed
    )


def _sql(of: OpenRun, asked: Question) -> Any:
    listing = sql_answer(of.run.root, of.run.name, asked.text("q"), most=ROWS + 1, seconds=SQL_S)
    rows = [[_cell(value) for value in row] for row in listing.rows[:ROWS]]
    return {"columns": list(listing.columns), "rows": rows, "more": len(listing.rows) > ROWS}


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= CELL else f"{text[:CELL]} … ({len(text):,} characters)"


def _verify(of: OpenRun, asked: Question) -> Any:
    return {"problems": of.run.folder.verify(asked.index())}


ANSWERS: dict[str, Answer] = {
    "overview": _overview,
    "figure": _figure,
    "iteration": _iteration,
    "group": _group,
    "sample": _sample,
    "tokens": _tokens,
    "turns": _turns,
    "lineage": _lineage,
    "step": _step,
    "account": _account,
    "timeline": _timeline,
    "evaluations": _evaluations,
    "evaluation": _evaluation,
    "sql": _sql,
    "verify": _verify,
}
COMPARED = 8  # runs


class Viewer:
    """The runs under a storage root, opened as they are asked for."""

    def __init__(self, root: str, run: str, follow: bool = False) -> None:
        """run: which is shown first. follow: whether pages ask again by themselves. Raises StorageError without such a run."""
        self.root, self.first, self.follow = root, run, follow
        self._opened: dict[str, OpenRun] = {run: OpenRun.of(root, run)}
        self._lock = threading.Lock()

    def of(self, name: str) -> OpenRun:
        """A run. Raises StorageError if there is none of the name."""
        with self._lock:
            if name not in self._opened:
                self._opened[name] = OpenRun.of(self.root, name)
            return self._opened[name]

    def ask(self, name: str, what: str, values: Mapping[str, str]) -> Any:
        """An answer about a run. Raises MillraceError, naming the file or the parameter."""
        if what not in ANSWERS:
            raise MissingFileError("no such answer", where=what, remedy=f"there are {', '.join(ANSWERS)}")
        return ANSWERS[what](self.of(name), Question(values))

    def runs(self) -> list[str]:
        """Names of the runs under the root."""
        store = Store(self.root)
        return [name for name in store.folders() if name == self.first or store.exists(f"{name}/{RECORD}")]

    def compare(self, names: list[str], figure: str) -> overview.ComparedRuns:
        """Runs side by side. Raises StorageError for an unknown one, ConfigError for too many."""
        if not 1 <= len(names) <= COMPARED:
            raise ConfigError(f"are {len(names)}", where="runs", remedy=f"name 1 to {COMPARED}")
        runs = [self.of(name).run for name in names]
        for run in runs:
            run.refresh()
        return overview.compared(runs, figure)


def as_json(value: Any) -> bytes:
    """An answer as JSON. A number that is not finite is null."""
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
