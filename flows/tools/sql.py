"""`millrace sql`: DuckDB over the committed tables of a run.

Owns the views: prompts, samples, rewards, verdicts, batches, steps, evaluations. Reads what manifests name, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import duckdb
import fsspec
import pyarrow as pa
from rich.table import Table

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.errors import MillraceError
from millrace.flows.tools.browse import run_record

VIEWS = {
    "prompts": "prompts.parquet",
    "samples": "rollouts/",
    "rewards": "rewards/",
    "verdicts": "verdicts.parquet",
    "batches": "batch.parquet",
}


class QueryError(MillraceError):
    """DuckDB rejected the query."""


def connect(root: str, run: str) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with the run's views. Raises StorageError if there is no such run."""
    run_record(root, run)
    folder = RunFolder(root, run)
    connection = duckdb.connect()
    if "://" in folder.store.url:
        protocol = folder.store.url.split("://")[0]
        connection.register_filesystem(fsspec.filesystem(protocol))
    manifests = folder.manifests()
    for view, prefix in VIEWS.items():
        files = [
            folder.iteration(index).url_of(entry.path)
            for index, manifest in manifests.items()
            for entry in manifest.files
            if entry.path == prefix or (prefix.endswith("/") and entry.path.startswith(prefix))
        ]
        _view(connection, view, files)
    _view(connection, "evaluations", _evaluations(folder))
    steps = [
        {
            "iteration": index,
            **{name: value for name, value in step.items() if not isinstance(value, list | dict)},
        }
        for index in manifests
        for step in folder.iteration(index).read_json("step.json")["steps"]
    ]
    if steps:
        connection.register("steps", pa.Table.from_pylist(steps))
    return connection


def query_table(root: str, run: str, query: str) -> Table:
    """The answer of a query as a table for the terminal. Raises QueryError with DuckDB's message."""
    connection = connect(root, run)
    try:
        answer: Any = connection.sql(query)
        columns, rows = (answer.columns, answer.fetchall()) if answer is not None else ([], [])
    except duckdb.Error as error:
        raise QueryError(f"{error}\nViews: {', '.join([*VIEWS, 'steps', 'evaluations'])}") from error
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(value)[:200] for value in row))
    return table


def _evaluations(folder: RunFolder) -> list[str]:
    return [folder.store.url_of(path) for path in folder.store.list("eval") if path.endswith(".parquet")]


def _view(connection: duckdb.DuckDBPyConnection, name: str, files: Iterable[str]) -> None:
    listed = ", ".join("'" + path.replace("'", "''") + "'" for path in files)
    if listed:
        connection.execute(
            f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{listed}], union_by_name=true)"
        )
