"""`millrace sql`: DuckDB over the tables of a run, including tables of its open iterations so far.

Owns the views: prompts, samples, rewards, verdicts, batches, logprobs, steps, evaluations, metrics. Reads files that manifests
and records name, after a check, and files of open iterations' tasks without a record; changes nothing. Iterations count from 1.
A query reads the views and nothing else, unless its caller opens files to it.
"""

import threading
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import duckdb
import fsspec
import pyarrow as pa
import typer

from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.iteration_files import TABLES, IterationFiles
from millrace.connectors.storage.parts import PART_FOLDERS, list_parts
from millrace.connectors.storage.run_folder import LOGPROBS, RunFolder, open_iterations
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import MillraceError
from millrace.flows.commands.listing import CsvOption, JsonOption, Listing, print_listing
from millrace.flows.commands.named_files import named_by_records
from millrace.flows.commands.terminal import RootOption, guarded
from millrace.flows.driver.stored_run import figures_of, run_record, settings_of

VIEWS = {
    "prompts": "prompts.parquet",
    "samples": "rollouts/",
    "turns": "turns/",
    "rewards": "rewards/",
    "verdicts": "verdicts.parquet",
    "batches": "batch.parquet",
    "logprobs": "logprobs/",
}
MAY_BE_EMPTY = ("turns", "logprobs")  # many runs have none
ALL = (*VIEWS, "steps", "evaluations", "metrics")
EXCERPT = 60  # characters of a statement that a message shows
METRICS = pa.schema([("iteration", pa.int32()), ("name", pa.string()), ("value", pa.float64())])
# Text of a prompt: a plain text or a single user message unchanged, else its messages without a leading system message.
MACROS = """
CREATE MACRO its_system(x) AS CASE WHEN json_type(x) = 'ARRAY' AND x->>'$[0].role' = 'system' THEN x->>'$[0].content' END;
CREATE MACRO its_messages(x) AS CASE WHEN its_system(x) IS NULL THEN from_json(x, '["JSON"]')
  ELSE from_json(x, '["JSON"]')[2:] END;
CREATE MACRO message_text(m) AS coalesce(m->>'content', m->>'tool_calls', '');
CREATE MACRO messages_text(them) AS CASE WHEN len(them) = 1 AND them[1]->>'role' = 'user' THEN message_text(them[1])
  ELSE list_aggregate(list_transform(them, lambda m: (m->>'role') || ': ' || message_text(m)), 'string_agg', chr(10)) END;
CREATE MACRO prompt_text(x) AS CASE WHEN json_type(x) = 'ARRAY' THEN messages_text(its_messages(x)) ELSE x->>'$' END;
"""
WITH_PROMPT = {"prompts": "source", "samples": "source", "batches": "source", "evaluations": "set"}
REUSING = ("verdicts", "batches")  # name the iteration that generated a reused sample
DONE = r"""CAST(regexp_extract(filename, '(\d+)\.parquet$', 1) AS INTEGER)"""


def sql(
    run: str,
    query: str,
    root: RootOption = "runs",
    allow_files: Annotated[
        bool,
        typer.Option(
            "--allow-files",
            help="Let the query read and write other files, load extensions and open network addresses, with your rights.",
        ),
    ] = False,
    json: JsonOption = False,
    csv: CsvOption = False,
) -> None:
    """Ask DuckDB about a run: views prompts, samples, turns, rewards, verdicts, batches, steps, evaluations, metrics."""
    print_listing(guarded(lambda: answer(root, run, query, allow_files=allow_files)), json, csv)


class QueryError(MillraceError):
    """DuckDB rejected the query."""


def connect(
    root: str, run: str, views: Collection[str] = ALL, *, allow_files: bool = False
) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with these of the run's views. Their files are checked first, against what committed them.

    allow_files: the connection may also read and write other files, load extensions and open network addresses.

    Raises StorageError if there is no such run, or a file is missing or changed.
    """
    settings = settings_of(run_record(root, run))
    folder = RunFolder(root, run)
    connection = duckdb.connect()
    connection.execute(MACROS)
    if "://" in folder.store.url:
        protocol = folder.store.url.split("://")[0]
        connection.register_filesystem(fsspec.filesystem(protocol))
    committed = folder.first_open_iteration()
    opened = open_iterations(folder)
    iterations = [IterationFiles(folder, index) for index in (*range(committed), *opened)]
    known = [(files, _entries(files)) for files in iterations]
    read: list[str] = []
    for view, prefix in VIEWS.items():
        if view not in views:
            continue
        named = [
            (files.folder, entry)
            for files, entries in known
            for entry in entries
            if entry.path == prefix or (prefix.endswith("/") and entry.path.startswith(prefix))
        ]
        read += _view(connection, view, named, columns_of(view, settings, committed))
    if "evaluations" in views:
        shown = columns_of("evaluations", settings, committed)
        read += _view(connection, "evaluations", _evaluations(folder, committed, opened), shown)
    steps = [
        {
            "iteration": iteration_number(files.index),
            **{name: value for name, value in step.items() if not isinstance(value, list | dict)},
        }
        for files, entries in (known if "steps" in views else ())
        for step in _steps(files, entries)
    ]
    if steps:
        connection.register("steps", pa.Table.from_pylist(steps))
    if "metrics" in views:
        connection.register("metrics", _metrics(folder))
    if not allow_files:
        _close(connection, read)
    return connection


def answer(
    root: str,
    run: str,
    query: str,
    *,
    allow_files: bool = False,
    most: int | None = None,
    seconds: float | None = None,
) -> Listing:
    """The answer of a query. allow_files: as for `connect`. most: rows of the answer. seconds: then the query is ended.

    Raises QueryError if DuckDB rejects it, if it takes longer, or if it needs allow_files.
    """
    try:
        if not allow_files:
            _check_reads(query)
        connection = connect(root, run, _views_of(query), allow_files=allow_files)
        end = threading.Timer(seconds, connection.interrupt) if seconds else None
        if end:
            end.start()
        try:
            found: Any = connection.sql(query)
            if found is None:
                return Listing([], [])
            return Listing(found.columns, (found if most is None else found.limit(most)).fetchall())
        finally:
            if end:
                end.cancel()
    except duckdb.InterruptException as error:
        raise QueryError(
            f"took longer than {seconds:g} s", remedy="ask for less, or use `millrace sql`"
        ) from error
    except duckdb.Error as error:
        raise QueryError(f"{error}\nViews: {', '.join(ALL)}") from error


def _entries(files: IterationFiles) -> list[FileEntry]:
    """The named files of an iteration; for an open one also the files that tasks without a record have written so far."""
    entries = list(files.entries.values())
    if files.manifest:
        return entries
    named = {part for entry in entries for part in (entry.path, entry.path.split("/")[0])}
    written = [path for kind in PART_FOLDERS if kind not in named for path in list_parts(files.folder, kind)]
    written += [] if LOGPROBS in named else files.folder.list(LOGPROBS)
    written += sorted(set(TABLES) & set(files.folder.list()) - named)
    with files.with_remedy():
        return [*entries, *files.folder.entries(written)]


def _metrics(folder: RunFolder) -> pa.Table:
    """Every metric of the committed iterations, a row each; held-out metrics from before training have iteration 0."""
    rows = [
        {"iteration": number, "name": name, "value": value}
        for number, figures in figures_of(folder)
        for name, value in figures.items()
    ]
    return pa.Table.from_pylist(rows, METRICS)


def _steps(files: IterationFiles, entries: list[FileEntry]) -> list[dict[str, Any]]:
    with files.with_remedy():
        found = [files.folder.read_json(entry.path, entry) for entry in entries if entry.path == "step.json"]
    return [step for content in found for step in content["steps"]]


def _evaluations(folder: RunFolder, committed: int, opened: Sequence[int]) -> list[tuple[Store, FileEntry]]:
    named = [entry for index in (*range(committed), *opened) for entry in named_by_records(folder, index)]
    tables = {entry.path: entry for entry in named if entry.path.startswith("eval/")}
    of_open = tuple(f"/{done:06d}.parquet" for done in ((committed + 1,) if committed else (0, 1)))
    written = [path for path in folder.store.list("eval") if path.endswith(of_open)]
    entries = [*tables.values(), *folder.store.entries(path for path in written if path not in tables)]
    return [(folder.store, entry) for entry in entries]


def _check_reads(query: str) -> None:
    """Raise QueryError for a statement that does more than read: some, such as COPY, could overwrite a view's file."""
    for statement in duckdb.extract_statements(query):
        # DuckDB reports PIVOT only as several statements, and a COPY of a PIVOT too
        first = statement.query.split(maxsplit=1)[:1]
        if statement.type != duckdb.StatementType.SELECT and not (
            statement.type == duckdb.StatementType.MULTI
            and first[0].lower() in ("pivot", "from", "select", "with")
        ):
            raise QueryError(
                "does more than read the run's views",
                where=statement.query.strip()[:EXCERPT],
                remedy="ask by SELECT, DESCRIBE, SHOW, SUMMARIZE or PIVOT; --allow-files lets a query do everything DuckDB does",
            )


def _close(connection: duckdb.DuckDBPyConnection, files: Sequence[str]) -> None:
    """From now on the connection reads only these files, writes none, and opens no address. No statement can undo this."""
    listed = ", ".join(map(quoted, files))
    for setting in (
        f"allowed_paths = [{listed}]",
        "python_enable_replacements = false",
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")


def _view(
    connection: duckdb.DuckDBPyConnection, name: str, files: list[tuple[Store, FileEntry]], columns: str
) -> list[str]:
    """Create the view; returns the files that it reads."""
    in_threads(lambda file: file[0].verify(file[1]), files)
    read = [store.url_of(entry.path) for store, entry in files]
    listed = ", ".join(map(quoted, read))
    if listed:
        rows = f"read_parquet([{listed}], union_by_name=true, filename=true)"
        connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM {rows}")
    elif name in MAY_BE_EMPTY:
        connection.register(name, schema.schema(name).empty_table())
    return read


def _views_of(query: str) -> Collection[str]:
    """The views that a query reads; all views if DuckDB cannot tell before it has their columns."""
    try:
        return duckdb.connect().get_table_names(query) or ALL
    except duckdb.Error:
        return ALL


def columns_of(view: str, settings: dict[str, Any], committed: int) -> str:
    """The columns that a view selects. settings: the run's configuration. committed: number of committed iterations."""
    changed, added = [], []
    if view in WITH_PROMPT:
        changed += ["prompt_text(prompt) AS prompt", "label->>'$' AS label"]
        added += [f"{_system(view, settings)} AS system", "prompt AS messages"]
    if view in REUSING:
        changed.append("reused_from + 1 AS reused_from")
    if view == "evaluations":
        added.append(f"{DONE} AS iteration")
    elif view in WITH_PROMPT:
        changed.append("iteration + 1 AS iteration")
        added.append(f"iteration < {committed} AS committed")
    replaced = f" REPLACE ({', '.join(changed)})" if changed else ""
    return ", ".join([f"* EXCLUDE (filename){replaced}", *added])


def quoted(text: str) -> str:
    """A text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def _system(view: str, settings: dict[str, Any]) -> str:
    """The system message that a row's prompt was sent with: its own, else that of its source or set."""
    section = settings["evaluation"]["sets"] if view == "evaluations" else settings["data"]["sources"]
    given = {item["name"]: item["system"] for item in section if item.get("system")}
    cases = " ".join(f"WHEN {quoted(name)} THEN {quoted(text)}" for name, text in given.items())
    column = f'"{WITH_PROMPT[view]}"'
    return f"coalesce(its_system(prompt), CASE {column} {cases} END)" if cases else "its_system(prompt)"
