"""What runs, show and sql print: on a terminal of any width, in a pipe, as JSON and as CSV; and every recipe of docs/looking.md."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config.pipeline import Pipeline
from millrace.flows.commands import app
from millrace.flows.commands import listing as printing
from millrace.flows.commands.listing import Listing
from millrace.flows.commands.show import _pipeline
from millrace.flows.commands.sql import ALL, QueryError, answer, connect
from millrace.flows.driver.stored_run import evaluations
from millrace.tasks.reporting.pictures import Curves
from tests.support.doc_commands import blocks
from tests.support.stored_run import MESSAGES, SYSTEM, write_run

PAGE = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
RECIPES = blocks("looking", "sql")
LONG = "an answer of many words, " * 20
COMMANDS = {
    "runs": ["runs"],
    "show": ["show", "a"],
    "ledger": ["ledger", "a"],
    "ledger of an iteration": ["ledger", "a", "--at", "1"],
    "sql": ["sql", "a", "select * from evaluations"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("runs"))
    write_run(folder)
    return folder


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "40"})
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(root: str, query: str) -> list[Any]:
    return list(answer(root, "a", query).rows)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_csv_and_a_pipe_hold_the_same_whole_values(root: str, command: str) -> None:
    asked = [*COMMANDS[command], "--root", root]
    whole = json.loads(call(*asked, "--json"))
    objects = whole["rows"] if isinstance(whole, dict) else whole
    lines = list(csv.DictReader(io.StringIO(call(*asked, "--csv"))))
    assert [list(line) for line in lines] == [list(item) for item in objects]
    for line, item in zip(lines, objects, strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in item.items()}
    piped = call(*asked)
    for name in objects[0]:
        assert name in piped
    assert "…" not in piped


def test_show_has_a_column_per_set_and_a_row_before_training(root: str) -> None:
    shown = json.loads(call("show", "a", "--root", root, "--json"))
    held_out = [(row["iteration"], row["eval/easy"], row["eval/hard"]) for row in shown["rows"]]
    assert held_out == [(0, 0.5, 0.5), (1, None, None), (2, 1.0, 0.5)]
    assert shown["folder"].endswith("/a")
    assert json.loads(call("runs", "--root", root, "--json"))[0]["iterations"] == 2


@pytest.mark.parametrize(("key", "name"), [("code_revision", "code"), ("mlflow_run_id", "MLflow run")])
def test_show_has_no_line_for_what_a_run_does_not_have(
    root: str, key: str, name: str, tmp_path: Path
) -> None:
    """An installed millrace has no revision, and a run without MLflow no run there."""
    write_run(str(tmp_path))
    store = RunFolder(str(tmp_path), "a").store
    for value in ("0123abc", None):
        store.write_sealed("run.json", {**store.read_sealed("run.json"), key: value})
        assert json.loads(call("show", "a", "--root", str(tmp_path), "--json")).get(name) == value


UNUSUAL = {
    "ahead": 2,
    "max_staleness": 3,
    "sync_every": 4,
    "select": "finish",
    "reserve": 0.5,
    "on_update": "keep",
    "min_ess": 0.25,
    "eager": True,
    "eager_groups": 8,
    "rollouts_only": True,
    "rollouts_from": "another",
}


def test_show_says_what_of_the_pipeline_is_not_as_usual() -> None:
    usual = Pipeline().model_dump(mode="json")
    assert UNUSUAL.keys() == usual.keys()
    assert _pipeline(usual) == _pipeline({}) == ""
    for name, value in UNUSUAL.items():
        assert _pipeline({**usual, name: value}) == f"{name} {value}"


@pytest.mark.parametrize("width", [30, 80, 200])
def test_a_table_on_a_terminal_has_its_width_and_loses_no_row_or_column(width: int) -> None:
    listing = Listing(
        ["name", "[b]answer[/b]", "number"], [("x" * 64, f"[/]{LONG}", 0.123456), ("y", None, 3)]
    )
    out = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    printing._print_table(listing, out, printing.LONGEST)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    joined = re.sub(r"[\s│┃]", "", text)
    for part in ("name", "[b]answer[/b]", "number", "0.1235", "y", "3"):
        assert part in joined
    assert joined.count("x") >= 64
    whole = Console(file=io.StringIO(), width=printing.UNLIMITED, color_system=None)
    printing._print_table(listing, whole, None)
    assert f"[/]{LONG}" in whole.file.getvalue()  # type: ignore[attr-defined]


def test_json_has_no_number_that_json_lacks() -> None:
    text = Listing(["a"], [(float("nan"),), ({1: float("inf")},)]).as_json()
    assert json.loads(text) == [{"a": None}, {"a": {"1": None}}]


def test_prompts_and_labels_are_text_with_the_system_message_that_was_sent(root: str) -> None:
    chat = "user: 1+1=\nassistant: 2\nuser: 2+3="
    for view in ("prompts", "samples"):
        found = rows(root, f"select distinct source, prompt, label, system from {view} order by source")
        assert found == [("chats", chat, '{"value":5}', "Think."), ("sums", "1+2=", "3", SYSTEM)]
    assert rows(root, "select distinct prompt, label, system from batches") == [("1+2=", "3", SYSTEM)]
    words = "select distinct reward_texts['words'], answer = response from {} where reward = 1"
    assert rows(root, words.format("batches")) == [("It is 1.", True)]
    assert rows(root, words.format("rewards join samples using (sample_id)")) == [("It is 1.", True)]
    sent = rows(root, "select distinct set, system from evaluations order by set")
    assert sent == [("easy", SYSTEM), ("hard", None)]
    (stored,) = rows(root, "select distinct messages from prompts where source = 'chats'")[0]
    assert json.loads(stored) == MESSAGES


def test_the_open_iteration_is_there_and_is_no_committed_one(root: str) -> None:
    found = rows(root, "select iteration, committed, count(*) from samples group by all order by all")
    assert found == [(1, True, 4), (2, True, 4), (3, False, 4)]
    assert rows(root, "select iteration, committed from prompts order by all desc limit 1") == [(3, False)]
    assert rows(root, "select distinct iteration from evaluations order by 1") == [(0,), (2,)]
    assert rows(root, "select iteration, version from steps") == [(1, 1), (2, 2)]


def test_each_recipe_of_the_page_finds_something(root: str) -> None:
    assert len(RECIPES) >= 8
    for recipe in RECIPES:
        assert rows(root, recipe), recipe
    with pytest.raises(QueryError, match="Views: prompts"):
        answer(root, "a", "select * from nothing")


def columns_in(section: str) -> set[str]:
    """The columns that the table of a section of the page lists."""
    lines = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    return {
        name
        for line in lines
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }


@pytest.mark.parametrize("view", ALL)
def test_the_page_has_every_view_with_its_columns(root: str, view: str) -> None:
    own, common = columns_in(view), columns_in("Every view")
    there = set(connect(root, "a").sql(f"select * from {view}").columns)
    if view == "steps":  # which has the algorithm's numbers too
        assert own <= there
    else:
        assert own | (common & there) == there


def test_an_evaluation_stands_at_the_weights_that_it_is_of_whichever_iteration_made_it(
    tmp_path: Path,
) -> None:
    """The second iteration waited for its own, others evaluated what they began with, and the last also what it made."""
    folder, name = RunFolder(str(tmp_path), "b"), "eval/easy/reward_mean"
    own: list[dict[str, float]] = [{}, {name: 0.2}, {}, {name: 0.4}]
    began = [{name: 0.0}, {}, {}, {name: 0.3}]
    for index, (metrics, behind) in enumerate(zip(own, began, strict=True)):
        evaluated = {"evaluated": {"done": index, "version": 2 * index, "metrics": behind}}
        tasks = {"metrics": metrics, **(evaluated if behind else {})}
        folder.commit_manifest(index, Manifest(iteration=index, files=[], tasks=tasks))
    expected = {0: 0.0, 2: 0.2, 3: 0.3, 4: 0.4}
    found = evaluations(folder, folder.committed())
    assert found == {done: {"easy": value} for done, value in expected.items()}
    curves = Curves()
    curves.read(folder)
    assert curves.points(name) == sorted(expected.items())


@pytest.mark.parametrize("command", ["show", "ledger"])
def test_a_table_has_the_newest_rows_and_says_how_many_came_before(root: str, command: str) -> None:
    asked = [command, "a", "--root", root]
    whole = json.loads(call(*asked, "--json"))["rows"]
    assert len(whole) > 1
    newest = call(*asked, "--newest", "1")
    assert f"{len(whole) - 1} rows before these: --newest 0 shows all" in newest
    assert newest.splitlines()[-2] == call(*asked).splitlines()[-2]  # above the frame
    assert call(*asked, "--newest", "0") == call(*asked)
    assert call(*asked, "--newest", "1", "--json") == call(*asked, "--json")


def test_metrics_are_rows_and_show_takes_any_of_them_by_name_or_pattern(root: str) -> None:
    known = rows(root, "select iteration, name, value from metrics order by all")
    assert (0, "eval/easy/reward_mean") in [row[:2] for row in known]
    assert (1, "train/loss", 0.5) in known
    assert (2, "train/loss", 0.25) in known
    shown = json.loads(
        call(
            "show",
            "a",
            "--root",
            root,
            "--columns",
            "train/*",
            "--columns",
            "eval/easy/reward_mean",
            "--json",
        )
    )
    assert list(shown["rows"][0]) == ["iteration", "train/loss", "eval/easy/reward_mean"]
    assert [row["train/loss"] for row in shown["rows"]] == [None, 0.5, 0.25]
    refused = CliRunner().invoke(app, ["show", "a", "--root", root, "--columns", "nope/*"])
    assert refused.exit_code == 2
    assert "--columns nope/*" in refused.stderr
    assert "train/*" in refused.stderr


def test_a_table_that_no_screen_is_wide_enough_for_is_json_lines_in_a_pipe(root: str) -> None:
    lines = call("sql", "a", "select *, repeat('x', 500) as wide from rewards", "--root", root).splitlines()
    assert len(lines) == len(rows(root, "select * from rewards"))
    assert all(len(json.loads(line)["wide"]) == 500 for line in lines)
    assert call("sql", "a", "select 1 as one", "--root", root).startswith("┏")
