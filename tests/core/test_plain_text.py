"""Text that any reader takes: half characters become their escapes, all other text stays."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.connectors.user_code.pool import WorkerPool
from millrace.core.contracts.schema import ROWS, SCHEMAS, to_table
from millrace.core.errors import MillraceError, described
from millrace.core.plain_text import json_text, printable, take_any_text, whole, whole_values

ROOT = Path(__file__).parents[2]

TEXTS = {
    "plain": "plain",
    "naïve 日本 😀": "naïve 日本 😀",
    "\ud83d": "\\ud83d",
    "a\udcffb": "a\\udcffb",
    "\ud83d\ude00": "\\ud83d\\ude00",  # both halves, put together from two texts
    "\ude00 first": "\\ude00 first",
    "é\ud800é": "é\\ud800é",
    "": "",
    "nul \0": "nul \0",
    "\\ud83d": "\\ud83d",
    "line\nnext\ttab": "line\nnext\ttab",
}
any_text = st.text(st.characters(codec=None))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | any_text,
    lambda inner: st.lists(inner) | st.dictionaries(any_text, inner),
    max_leaves=6,
)


@pytest.mark.parametrize("text", TEXTS)
def test_half_characters_become_their_escapes(text: str) -> None:
    assert whole(text) == TEXTS[text]


@given(any_text)
def test_any_text_can_be_stored_and_a_whole_one_stays(text: str) -> None:
    made = whole(text)
    assert whole(made) == made == made.encode().decode()


@given(values)
def test_json_can_be_stored_and_says_the_same(value: object) -> None:
    text = json_text(value)
    text.encode()
    assert json.loads(text) == json.loads(json.dumps(value))
    json.dumps(whole_values(value), ensure_ascii=False).encode()


@given(any_text)
def test_what_is_printed_moves_no_cursor(text: str) -> None:
    assert not any(ord(character) < 32 and character not in "\n\t" for character in printable(text))


def test_control_characters_are_shown() -> None:
    assert printable("a\x1b[2J\0\x07\x9b\r\nb\tc") == "a\\x1b[2J\\x00\\x07\\x9b\\x0d\nb\tc"


@pytest.mark.parametrize("kind", ROWS)
def test_every_text_column_of_every_table_takes_half_a_character(kind: str) -> None:
    class Row:
        pass

    row, odd = Row(), 0
    for field in SCHEMAS[kind]:
        value: object = None
        if pa.types.is_string(field.type):
            value, odd = "x \ud83d", odd + 1
        elif pa.types.is_map(field.type) and pa.types.is_string(field.type.item_type):
            value, odd = [("x \ud83d", "x \ud83d")], odd + 2
        elif pa.types.is_map(field.type):
            value, odd = [("x \ud83d", 1.0)], odd + 1
        setattr(row, field.name, value)
    table = to_table([row], kind)
    assert odd > 0
    assert str(table.to_pylist()).count("x \\\\ud83d") == odd


def test_errors_and_their_reasons_are_whole() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            return "half \ud83d \x1b[0m"

    assert described(Mute()) == "Mute: half \\ud83d \\x1b[0m"
    assert str(MillraceError("a\ud83d", where="b\ud83d", remedy="c\ud83d")) == "b\\ud83d: a\\ud83d; c\\ud83d"


async def test_what_comes_of_a_worker_is_a_reason_that_can_be_stored() -> None:
    pool = WorkerPool(1)
    try:
        outcome = await pool.call(json.loads, "\ud83d", timeout_s=60)
        printed = await pool.call(print, "\ud83d", timeout_s=60)
        assert outcome.kind == "failed"
        assert (outcome.reason or "").encode()
        assert printed.kind == "done", printed.reason
    finally:
        pool.close()


def test_streams_and_the_log_take_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    out, factory = io.BytesIO(), logging.getLogRecordFactory()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "utf-8", write_through=True))
    try:
        take_any_text()
        print("half \ud83d")
        record = logging.makeLogRecord({"msg": "%s and %s", "args": (ValueError("\ud83d"), 1)})
        line = logging.getLogRecordFactory()("n", 20, "p", 1, "%s and %d", (ValueError("\ud83d"), 1), None)
        assert (line.getMessage(), type(record)) == ("\\ud83d and 1", type(line))
    finally:
        logging.setLogRecordFactory(factory)
    assert out.getvalue() == b"half \\ud83d\n"


def test_json_that_may_hold_half_a_character_is_written_here_alone() -> None:
    """`ensure_ascii=False` elsewhere would make text that cannot be stored. A chat template's text is tokenised by way of `whole`,
    and a row's text is looked at for what cannot be stored."""
    folders = (ROOT / name for name in ("core", "connectors", "tasks", "flows"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 300
    elsewhere = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if re.search(r"ensure_ascii=(?!True)", path.read_text(encoding="utf-8"))
    }
    assert elsewhere == {
        "core/plain_text.py",
        "core/families/template_process.py",
        "core/contracts/rows/prompts.py",
    }
