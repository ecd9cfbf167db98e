"""`millrace sql`: DuckDB over the committed tables of a run.

Owns the views: prompts, samples, rewards, verdicts, batches, steps, evaluations. Reads what manifests and
records name, checked, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import duckdb
import fsspec
import pyarrow as pa
from rich.table import Table

from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.errors import MillraceError
from millrace.flows.tools.browse import run_record
from millrace.flows.tools.named_files import named_by_records

VIEWS = {
    "prompts": "prompts.parquet",
    "samples": "rollouts/",
    "rewards": "rewards/",
    "verdicts": "verdicts.parquet",
    "batches": "batch.parquet",
}
ALL = (*VIEWS, "steps", "evaluations")


class QueryError(MillraceError):
    """DuckDB rejected the query."""


def connect(root: str, run: str, views: Collection[str] = ALL) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with these of the run's views. Their files are checked first, against what committed them.

    Raises StorageError if there is no such run, or a file is gone or changed.
    """
    run_record(root, run)
    folder = RunFolder(root, run)
    connection = duckdb.connect()
    if "://" in folder.store.url:
        protocol = folder.store.url.split("://")[0]
        connection.register_filesystem(fsspec.filesystem(protocol))
    iterations = [IterationFiles(folder, index) for index in folder.manifests()]
    for view, prefix in VIEWS.items():
        if view not in views:
            continue
        named = [
            (files.folder, entry)
            for files in iterations
            for entry in files.entries.values()
            if entry.path == prefix or (prefix.endswith("/") and entry.path.startswith(prefix))
        ]
        _view(connection, view, named)
    if "evaluations" in views:
        _view(connection, "evaluations", _evaluations(folder, len(iterations)))
    steps = [
        {
            "iteration": files.index,
            **{name: value for name, value in step.items() if not isinstance(value, list | dict)},
        }
        for files in (iterations if "steps" in views else ())
        for step in files.read_json("step.json")["steps"]
    ]
    if steps:
        connection.register("steps", pa.Table.from_pylist(steps))
    return connection


def query_table(root: str, run: str, query: str) -> Table:
    """The answer of a query as a table for the terminal. Raises QueryError with DuckDB's message."""
    try:
        connection = connect(root, run, _views_of(query))
        answer: Any = connection.sql(query)
        columns, rows = (answer.columns, answer.fetchall()) if answer is not None else ([], [])
    except duckdb.Error as error:
        raise QueryError(f"{error}\nViews: {', '.join(ALL)}") from error
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(value)[:200] for value in row))
    return table


def _evaluations(folder: RunFolder, committed: int) -> list[tuple[Store, FileEntry]]:
    named = [entry for index in range(committed) for entry in named_by_records(folder, index)]
    return [(folder.store, entry) for entry in named if entry.path.startswith("eval/")]


def _view(connection: duckdb.DuckDBPyConnection, name: str, files: list[tuple[Store, FileEntry]]) -> None:
    in_threads(lambda file: file[0].verify(file[1]), files)
    listed = ", ".join("'" + store.url_of(entry.path).replace("'", "''") + "'" for store, entry in files)
    if listed:
        connection.execute(
            f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{listed}], union_by_name=true)"
        )


def _views_of(query: str) -> Collection[str]:
    """The views that a query reads; all where DuckDB cannot say before it sees their columns."""
    try:
        return duckdb.connect().get_table_names(query) or ALL
    except duckdb.Error:
        return ALL
