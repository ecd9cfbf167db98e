"""`millrace score`: rows of a file scored without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from millrace.flows.commands import app

FORMS = "tests.support.reward_forms"
ROWS = [
    {"q": "1+1=", "prompt": "?", "response": "2", "label": 2, "task": "a"},
    {"q": "2+2=", "prompt": "?", "response": "five", "label": 4, "task": "a"},
    {"q": "3+3=", "prompt": "?", "response": "raises", "label": 6, "task": "b"},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "rows.jsonl"


def called(*arguments: str, expect: int = 0) -> str:
    result = CliRunner().invoke(app, ["score", *arguments], env={"COLUMNS": "2000"})
    assert result.exit_code == expect, result.output
    return result.output


def scores(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_scored_in_order_and_failures_counted_by_reason(file: Path) -> None:
    out = called(str(file), "--reward", f"{FORMS}:hostile")
    assert f"3 rows, 2 scored; scores in {file.parent}/rows.scores.jsonl" in out
    assert "mean 2.5, least 1 p10 1 median 1 p90 4 most 4" in out
    assert "1  KeyError: 'points' in reward_forms.py" in out
    made = scores(file.parent / "rows.scores.jsonl")
    assert [(row["row"], row["reward"], row["scoring"]) for row in made] == [
        (0, 1.0, "scored"),
        (1, 4.0, "scored"),
        (2, None, "failed"),
    ]


def test_a_file_of_which_no_row_could_be_scored_is_no_success(file: Path) -> None:
    file.write_text("".join(json.dumps({**row, "response": "raises"}) + "\n" for row in ROWS))
    out = called(str(file), "--reward", f"{FORMS}:hostile", expect=1)
    assert "3 rows, 0 scored" in out
    assert "3  KeyError: 'points' in reward_forms.py" in out


def test_marks_and_line_ends_of_other_systems_are_read(file: Path) -> None:
    """A mark at the start of a file, which a source of a run may have, was no JSON."""
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n\r\n"))
    assert "3 rows, 2 scored" in called(str(file), "--reward", f"{FORMS}:hostile")


def test_options_parts_and_parquet(file: Path) -> None:
    source, target = file.with_suffix(".parquet"), file.parent / "scores.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), source)
    called(str(source), "--reward", f"{FORMS}:Length", "--options", "{scale: 2}", "--out", str(target))
    rows = pq.read_table(target).to_pylist()
    assert [row["reward"] for row in rows] == [2.0, 8.0, 12.0]
    assert rows[0]["reward_parts"] == [("made", 1.0)]


def test_rows_of_a_group_are_scored_together(file: Path) -> None:
    called(str(file), "--reward", f"{FORMS}:rank", "--group-key", "task")
    assert [row["reward"] for row in scores(file.parent / "rows.scores.jsonl")] == [0.0, 1.0, 0.0]


def test_a_deadline_ends_a_row_alone(file: Path) -> None:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("hangs in C", "ok")))
    arguments = ("--reward", f"{FORMS}:hostile", "--response-key", "text", "--timeout-s", "1")
    out = called(str(file), *arguments)
    assert "1  no answer within 1 s" in out
    assert [row["reward"] for row in scores(file.parent / "rows.scores.jsonl")] == [None, 2.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--reward", "no.such:thing"], "reward.function = no.such:thing: cannot be imported"),
        (["--reward", "thing"], "write it as package.module:function"),
        (["--reward", f"{FORMS}:hostile", "--response-key", "text"], "name the column with --response-key"),
        (["--reward", f"{FORMS}:hostile", "--options", "[1]"], "is no mapping"),
        (["--reward", f"{FORMS}:hostile", "--options", "{key: '${env:NO_SUCH_KEY}'}"], "export NO_SUCH_KEY"),
        (["--reward", f"{FORMS}:hostile", "--out", "x.csv"], "the format is not known"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(file: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["score", str(file), *arguments], env={"COLUMNS": "2000"})
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_file_itself_is_not_replaced(file: Path) -> None:
    out = called(str(file), "--reward", f"{FORMS}:hostile", "--out", str(file), expect=2)
    assert "would replace the file that is read" in " ".join(out.split())
    assert scores(file) == ROWS


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_half_a_character_in_a_reason_or_a_name_is_stored_and_printed_with_its_escape(
    tmp_path: Path, ending: str
) -> None:
    """Once no scores were written."""
    rows = [{"prompt": "a", "response": str(number), "label": str(number)} for number in (1, 2, 3)]
    (tmp_path / "half.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / f"out.{ending}"
    printed = called(
        str(tmp_path / "half.jsonl"), "--reward", "tests.support.half_characters:scored", "--out", str(out)
    )
    assert "3 rows, 2 scored" in printed
    assert (
        "no number: half \\ud83d, byte \\udcff, nul \\x00, escape \\x1b[2J in half_characters.py" in printed
    )
    made = scores(out) if ending == "jsonl" else pq.read_table(out).to_pylist()
    assert [row["scoring"] for row in made] == ["scored", "failed", "scored"]
    assert "half \\ud83d" in next(iter(dict(made[0]["reward_parts"])))


def test_messages_and_labels_reach_a_reward_as_they_do_in_a_run(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "response": "2", "label": {"sum": 2}},
        {"prompt": [{"role": "user", "content": parts}], "response": "2", "label": {"all": [2]}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    called(str(tmp_path / "rows.parquet"), "--reward", f"{FORMS}:seen")
    assert [row["reward_parts"] for row in scores(tmp_path / "rows.scores.jsonl")] == [
        {"user: 1+1=": 1.0, "label: sum": 1.0},
        {"user: 1+1=": 1.0, "label: all": 1.0},
    ]
    rows[1]["prompt"][0]["content"] = [{"type": "image_url", "image_url": "x"}]  # type: ignore[index]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = called(str(tmp_path / "rows.jsonl"), "--reward", f"{FORMS}:seen", expect=2)
    assert "row 1: a message of its prompt cannot be shown: part 0 is of type image_url" in " ".join(
        said.split()
    )
