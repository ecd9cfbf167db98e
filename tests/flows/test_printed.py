"""What commands print moves no terminal, computes nothing in a spreadsheet, and opens no file by SQL.

A row for each command: what it shows comes from a run, a file or a configuration that holds control characters.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from millrace.core.plain_text import CONTROL, PlainConsole
from millrace.flows import commands
from millrace.flows.commands import app
from millrace.flows.commands.listing import Listing
from millrace.flows.commands.sql import QueryError, answer
from tests.support.stored_run import write_run
from tests.support.wrong_configs import GOOD

ROOT = Path(__file__).parents[2]
ODD = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r"
SHOWN = "\\x1b]0;owned"
QUERY = f"select '{ODD}' as answer, count(*) from samples"
SPOKEN = f"""
def score(sample):
    raise ValueError({ODD!r})
"""
# by command: its arguments, and with what it ends. {root} holds the odd run `a`; no other run is there
COMMANDS: dict[str, tuple[list[str], int]] = {
    "new": (["new", f"{{root}}/n{ODD}", "--recipe", ODD], 2),
    "train": (["train", f"no{ODD}.yaml"], 2),
    "check": (["check", "run.yaml", "reward.function=odd_reward:score", "data.sources.0.path=odd.jsonl"], 2),
    "quickstart": (["quickstart", "--name", ODD], 2),
    "pretrained": (["pretrained", f"{{root}}/there{ODD}"], 2),
    "models": (["models", ODD], 2),
    "runs": (["runs", "--root", "{root}"], 0),
    "show": (["show", "a", "--root", "{root}"], 0),
    "ledger": (["ledger", f"a{ODD}", "--root", "{root}"], 2),
    "verify": (["verify", f"a{ODD}", "--root", "{root}"], 2),
    "replay": (["replay", f"a{ODD}", "--from", "1", "--to", "2", "--root", "{root}"], 2),
    "sql": (["sql", "a", QUERY, "--root", "{root}"], 0),
    "view": (["view", f"a{ODD}", "--root", "{root}"], 2),
    "top": (["top", "a", "--once", "--root", "{root}"], 0),
    "chat": (["chat", f"no{ODD}"], 2),
    "plan": (["plan", f"no{ODD}.yaml", "--from", "a", "--root", "{root}"], 2),
    "score": (["score", "odd.jsonl", "--reward", "odd_reward:score", "--response-key", "prompt"], 1),
    "convert": (["convert", f"{{root}}/no{ODD}", f"{{root}}/to{ODD}"], 2),
    "branch": (["branch", f"a{ODD}", "b", "--at", "1", "--root", "{root}"], 2),
    "discard": (["discard", f"a{ODD}", "--iteration", "1", "--root", "{root}"], 2),
    "stop": (["stop", f"a{ODD}", "--root", "{root}"], 2),
    "server": (["server", f"start{ODD}"], 2),
    "ui": (["ui", f"a{ODD}", "--root", "{root}"], 2),
    "deploy": (["deploy", f"no{ODD}.yaml"], 2),
    "eval": (["eval", f"{{root}}/m{ODD}"], 2),
}
SILENT = {"server", "pretrained"}  # which do not repeat what was typed
LISTINGS = ("runs", "show", "sql")


def acted_on(text: str) -> list[str]:
    """Characters that a terminal acts on."""
    return CONTROL.findall(text)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("odd")
    store = write_run(str(folder)).store
    record = store.read_sealed("run.json")
    record["attempts"][-1]["ended"] = {"at": "2026-01-02T03:04:05+00:00", "by": ODD}
    record["code_revision"] = ODD
    store.write_sealed("run.json", record)
    (folder / f"there{ODD}").mkdir()
    return str(folder)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TERM", "dumb")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**GOOD, "model": {"path": f"m{ODD}"}}))
    (tmp_path / "odd.jsonl").write_text(json.dumps({"prompt": f"1+1={ODD}", "label": ODD}) + "\n")
    (tmp_path / "odd_reward.py").write_text(SPOKEN)
    return tmp_path


def call(arguments: list[str], root: str, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*(part.replace("{root}", root) for part in arguments), *more])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_every_command_has_a_row() -> None:
    assert set(commands.COMMANDS) == set(COMMANDS)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("command", "terminal"), [*((name, True) for name in COMMANDS), *((name, False) for name in LISTINGS)]
)
def test_what_a_command_prints_moves_no_terminal(
    command: str, terminal: bool, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.flows.commands.terminal.console._force_terminal", terminal)
    arguments, code = COMMANDS[command]
    ended, printed = call(arguments, root)
    assert acted_on(printed) == []
    assert ended == code, printed
    assert command in SILENT or "x1b" in "".join(printed.split()), printed


@pytest.mark.parametrize("form", ["--json", "--csv"])
@pytest.mark.parametrize("command", LISTINGS)
def test_json_and_csv_move_no_terminal_either(command: str, form: str, root: str) -> None:
    ended, printed = call(COMMANDS[command][0], root, form)
    assert (ended, acted_on(printed)) == (0, [])
    if form == "--json" and command == "sql":
        assert json.loads(printed)[0]["answer"] == ODD


WRITTEN: dict[str, Callable[[], Any]] = {
    "a text": lambda: ODD,
    "rich's text": lambda: Text(ODD),
    "markup": lambda: "[link=http://address/]here[/]",
    "a table": lambda: _table(),
    "progress": lambda: Progress.get_default_columns()[0].render(_task()),
}


def _table() -> Table:
    table = Table(ODD, title=ODD)
    table.add_row(Text(ODD))
    return table


def _task() -> Any:
    progress = Progress(console=PlainConsole(file=io.StringIO()))
    progress.add_task(ODD)
    return progress.tasks[0]


@pytest.mark.parametrize("what", WRITTEN)
def test_whatever_the_writer_is_given_is_printable(what: str) -> None:
    out = io.StringIO()
    PlainConsole(file=out, force_terminal=True, color_system=None, width=60).print(WRITTEN[what]())
    assert acted_on(out.getvalue()) == []
    assert ("x1b" in out.getvalue()) == (what != "markup")


def test_nothing_else_under_flows_writes_to_a_terminal() -> None:
    """The writer, and the streams that a command keeps its libraries from."""
    found = set()
    for path in (ROOT / "flows").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if text in ("print", "Console", "typer.echo", "typer.secho", "rich.print") or text.endswith(
                ("stdout.write", "stderr.write", "file.write")
            ):
                found.add((path.relative_to(ROOT).as_posix(), text))
    assert found == {
        ("flows/chat/shown.py", "console.file.write"),  # printable text, which tests/flows/chat reads
        ("flows/chat/shown.py", "self.console.file.write"),
        ("flows/commands/listing.py", "sys.stdout.write"),  # JSON and CSV, which the tests above read
        ("flows/commands/listing.py", "out.file.write"),
        ("flows/commands/top.py", "console.file.write"),  # the sequence that clears the screen
    }


@pytest.mark.parametrize("kind", ["an error", "a log line", "a logged error"])
def test_errors_and_log_lines_move_no_terminal(kind: str) -> None:
    raised = f"raise ValueError({ODD!r})"
    script = {
        "an error": f"def go():\n    {raised}",
        "a log line": f"def go():\n    logging.getLogger('x').warning('%s', {ODD!r})",
        "a logged error": f"def go():\n    try:\n        {raised}\n    except ValueError:\n        logging.getLogger('x').exception('it')",
    }[kind]
    code = (
        "import logging\nfrom millrace.core.plain_text import take_any_text\n"
        "from millrace.flows.commands.terminal import CommandLine\napp = CommandLine(pretty_exceptions_enable=False)\n"
        f"take_any_text()\nlogging.basicConfig()\n@app.command()\n{script}\napp([])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert acted_on(done.stdout + done.stderr) == []
    assert SHOWN in done.stderr
    assert done.returncode == (1 if kind == "an error" else 0)


FORMULAS = ["=1+1", "+cmd|'/C calc'!A0", "-2+3", "@SUM(1)", "\t=1"]
PLAIN = {"a": "a", "-0.5": "-0.5", "+3": "+3", "": "", "'": "'", "1e-3": "1e-3", "a\nb": "a\nb"}


def test_a_text_that_a_spreadsheet_would_compute_is_quoted_and_numbers_are_not() -> None:
    rows: list[Any] = [(text, -1.5, -2, None, True) for text in [*FORMULAS, *PLAIN]]
    lines = list(csv.reader(io.StringIO(Listing(["=a", "b", "c", "d", "e"], rows).as_csv())))
    assert lines[0][0] == "'=a"
    for text, line in zip([*FORMULAS, *PLAIN], lines[1:], strict=True):
        assert line[0] == (f"'{text}" if text in FORMULAS else PLAIN[text])
        assert line[1:] == ["-1.5", "-2", "", "True"]


# what a query may not do; {path} is a file beside the run, {part} one that a view reads
SHUT = [
    "select * from '{path}.parquet'",
    "select * from read_parquet('{path}.parquet')",
    "select * from read_text('/etc/passwd')",
    "select * from read_blob('/proc/self/environ')",
    "select * from read_csv('http://127.0.0.1:9/x.csv')",
    "select * from glob('/*')",
    "select count(*) from samples where response in (select content from read_text('/etc/passwd'))",
    "copy (select * from samples) to '{path}.csv'",
    "select 1; copy (select 1) to '{path}.csv'",
    "copy (select 1) to '{part}' (format parquet, use_tmp_file false)",
    "explain analyze copy (select 1) to '{part}' (format parquet, use_tmp_file false)",
    "/* */ copy (pivot (select 1 as a) on a) to '{part}' (format parquet, use_tmp_file false)",
    "copy (pivot (select 1 as a) on a) to '{part}' (format parquet, use_tmp_file false)",
    "prepare p as copy (select 1) to '{path}.csv'; execute p",
    "attach '{path}.db' as other",
    "export database '{path}'",
    "import database '{path}'",
    "install httpfs",
    "load httpfs",
    "create secret (type s3)",
    "set enable_external_access = true",
    "reset lock_configuration",
    "pragma enable_profiling = 'json'",
    "call pragma_version()",
    "create table t as select 1",
    "select * from query('select * from read_text(''/etc/passwd'')')",
    "select * from caller_has_this",
]
READ = [
    "select count(*) from samples",
    "from samples select count(*)",
    "with x as (select * from batches) select count(*) from x join verdicts using (sample_id)",
    "describe samples",
    "show tables",
    "summarize metrics",
    "pivot metrics on name using first(value)",
    "values (1)",
    "select 1; select 2",
]


@pytest.mark.parametrize("query", SHUT)
def test_sql_opens_the_runs_views_and_nothing_else(query: str, tmp_path: Path) -> None:
    write_run(str(tmp_path))
    (tmp_path / "kept.parquet").write_bytes(b"")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "kept.parquet")
    part = next((tmp_path / "a" / "iterations" / "000000" / "rollouts").glob("*.parquet"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    caller_has_this = pa.table({"a": [1]})
    with pytest.raises(QueryError):
        answer(str(tmp_path), "a", query.format(path=tmp_path / "kept", part=part))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    del caller_has_this


def test_sql_reads_every_view_and_with_files_what_its_user_may(tmp_path: Path) -> None:
    write_run(str(tmp_path))
    for query in READ:
        assert answer(str(tmp_path), "a", query).rows, query
    file = tmp_path / "made.csv"
    arguments = ["sql", "a", f"copy (select 1 as a) to '{file}'", "--root", str(tmp_path)]
    assert call(arguments, "")[0] == 2
    assert not file.exists()
    assert call(arguments, "", "--allow-files")[0] == 0
    assert file.read_text().split() == ["a", "1"]
