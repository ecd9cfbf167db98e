"""Rows of a source: what is usable, and the reason of what is not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.contracts.rows.messages import LossOn
from millrace.core.contracts.rows.prompts import (
    EXCERPT,
    PromptRow,
    Quarantined,
    SourceFingerprint,
    parse_line,
    parse_row,
    require_labels,
    source_changes,
    value_at,
)


@dataclass
class Columns:
    name: str = "set"
    prompt_key: str = "prompt"
    label_key: str | None = "label"
    metadata_key: str | None = "metadata"
    extra_keys: tuple[str, ...] = ()
    tools_key: str | None = None
    chat_template_kwargs_key: str | None = None
    sampling_key: str | None = None
    chat: bool = True
    label_from_prompt: bool = False
    loss_on: LossOn = "answer"
    images_key: str | None = None


KEYS = Columns()


def usable(line: bytes, row: int = 0, keys: Columns = KEYS) -> PromptRow:
    parsed = parse_line(line, row, keys)
    assert isinstance(parsed, PromptRow), parsed
    return parsed


def test_a_file_in_utf_16_is_named_as_what_it_is() -> None:
    lines = "\n".join(['{"prompt": "1+1="}'] * 3).encode("utf-16").split(b"\n")
    reasons = [parse_line(line, number, KEYS) for number, line in enumerate(lines)]
    assert all(isinstance(item, Quarantined) and item.reason.startswith("not UTF-8") for item in reasons)


@pytest.mark.parametrize(
    ("values", "key", "found"),
    [
        ({"a": 1}, "a", 1),
        ({"a": {"b": {"c": 1}}}, "a.b.c", 1),
        ({"a.b": 1, "a": {"b": 2}}, "a.b", 1),  # a column's own name comes first
        ({"a": [("b", 1)]}, "a.b", 1),  # a map of Arrow
        ({"a": {"b": None}}, "a.b", None),
        ({"a": {"b": 1}}, "a.c", "absent"),
        ({"a": "text"}, "a.b", "absent"),
        ({"a": [1]}, "a.b", "absent"),
        ({}, "a.b", "absent"),
    ],
)
def test_a_key_is_a_column_or_a_dotted_path_into_one(values: dict[str, Any], key: str, found: Any) -> None:
    assert value_at(values, key, "absent") == found


def test_text_and_messages_are_prompts_with_label_and_metadata() -> None:
    row = usable(b'{"prompt": "2 + 2 =", "label": "4", "metadata": {"level": 1}, "other": 3}', 5)
    assert (row.source, row.row, row.prompt, row.label, row.metadata) == (
        "set",
        5,
        "2 + 2 =",
        "4",
        {"level": 1},
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert usable(json.dumps({"prompt": messages}).encode()).prompt == messages
    called = [*messages, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert usable(json.dumps({"prompt": called}).encode()).prompt == [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
    ]


def test_columns_go_by_the_names_the_source_gives() -> None:
    keys = Columns(prompt_key="question", label_key="answer", metadata_key=None)
    row = usable(b'{"question": "q", "answer": [1, 2], "metadata": 3, "label": 4}', keys=keys)
    assert (row.prompt, row.label, row.metadata) == ("q", [1, 2], {})
    assert usable(b'{"question": "q"}', keys=Columns(prompt_key="question", label_key=None)).label is None


def test_metadata_may_be_json_text_and_a_byte_order_mark_is_no_fault() -> None:
    assert usable(b'{"prompt": "q", "metadata": "{\\"a\\": 1}"}').metadata == {"a": 1}
    assert usable(b'{"prompt": "q", "metadata": ""}').metadata == {}
    assert usable(b'\xef\xbb\xbf{"prompt": "q"}\r').prompt == "q"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "empty line"),
        (b"  \t", "empty line"),
        (b'{"prompt": "a"', "not JSON: "),
        (b"prompt: a", "not JSON: "),
        (b'{"prompt": "a", "label": NaN}', "not JSON: NaN"),
        (b"[" * 100_000, "not JSON: "),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 12"),
        (b'{"prompt": "\\ud800"}', "not UTF-8: a lone surrogate, in the prompt"),
        (b'{"prompt": "a", "label": "\\udfff"}', "not UTF-8: a lone surrogate, in the label"),
        (b"[1, 2]", "not an object: list"),
        (b"null", "not an object: NoneType"),
        (b'{"question": "a"}', "missing key: prompt"),
        (b'{"prompt": null}', "wrong type: the prompt is null"),
        (b'{"prompt": 3}', "wrong type: the prompt is int"),
        (b'{"prompt": {"role": "user", "content": "a"}}', "wrong type: the prompt is dict"),
        (b'{"prompt": ""}', "empty prompt: only white space"),
        (b'{"prompt": " \\n"}', "empty prompt: only white space"),
        (b'{"prompt": []}', "empty prompt: no message has content"),
        (b'{"prompt": [{"role": "user", "content": " "}]}', "empty prompt: no message has content"),
        (b'{"prompt": ["a"]}', "bad message: number 0: str, not an object"),
        (b'{"prompt": [{"content": "a"}]}', "bad message: number 0: role is 'None'"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}, {"role": "robot", "content": "a"}]}',
            "bad message: number 1: role is 'robot'",
        ),
        (b'{"prompt": [{"role": "user", "content": 3}]}', "bad message: number 0: content is int"),
        (b'{"prompt": [{"role": "user"}]}', "bad message: number 0: content is null"),
        (b'{"prompt": "a", "metadata": [1]}', "wrong type: metadata is list"),
        (b'{"prompt": "a", "metadata": "not json"}', "wrong type: metadata is text that is not JSON"),
    ],
)
def test_an_unusable_line_is_quarantined_with_its_reason(line: bytes, reason: str) -> None:
    parsed = parse_line(line, 3, KEYS)
    assert isinstance(parsed, Quarantined)
    assert (parsed.source, parsed.row) == ("set", 3)
    assert parsed.reason.startswith(reason), parsed.reason
    assert len(parsed.excerpt) <= 10 * EXCERPT


def test_what_json_cannot_hold_is_quarantined() -> None:
    for name, value in (("label", date(2020, 1, 1)), ("label", b"bytes"), ("label", float("nan"))):
        parsed = parse_row({"prompt": "a", name: value}, 0, KEYS)
        assert isinstance(parsed, Quarantined)
        assert parsed.reason.startswith("wrong type: ")
        assert parsed.reason.endswith(f", in the {name}")
    mapped = parse_row({"prompt": "a", "metadata": [("k", 1)]}, 0, KEYS)
    assert isinstance(mapped, PromptRow)
    assert mapped.metadata == {"k": 1}


json_ = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["prompt", "label", "metadata", "x"]), json_))
def test_any_row_is_usable_or_quarantined_and_can_be_stored(values: dict[str, Any]) -> None:
    parsed = parse_row(values, 0, KEYS)
    json.dumps(vars(parsed), ensure_ascii=False).encode("utf-8")


@given(st.binary(max_size=60))
def test_any_line_is_usable_or_quarantined_and_can_be_stored(line: bytes) -> None:
    parsed = parse_line(line, 0, KEYS)
    json.dumps(vars(parsed), ensure_ascii=False).encode("utf-8")


def test_prompt_ids_follow_from_source_row_and_content() -> None:
    line = b'{"prompt": [{"role": "user", "content": "a"}], "label": 1}'
    same = b'{"label": 2, "prompt": [{"content": "a", "role": "user"}]}'
    assert usable(line, 4).prompt_id == usable(same, 4).prompt_id
    others = [usable(line, 5), usable(line, 4, Columns(name="other")), usable(b'{"prompt": "a"}', 4)]
    assert len({row.prompt_id for row in [usable(line, 4), *others]}) == 4


def test_rows_without_a_label_are_refused_only_where_others_have_one() -> None:
    rows = [PromptRow("set", number, f"p{number}", "a", label) for number, label in enumerate([1, None, ""])]
    good, refused = require_labels(rows, KEYS)
    assert [row.row for row in good] == [0, 2]
    assert [(item.row, item.reason) for item in refused] == [
        (1, "missing key: label (other rows of the source have it)")
    ]
    assert require_labels(rows[1:2], KEYS) == (rows[1:2], [])
    assert require_labels(rows, Columns(label_key=None)) == (rows, [])


def test_what_changed_in_the_sources_is_named() -> None:
    def fingerprint(size: int, sha256: str, ids: str, path: str = "a.jsonl") -> SourceFingerprint:
        rows = [PromptRow("set", number, name, "a") for number, name in enumerate(ids)]
        return SourceFingerprint.of(path, size, sha256, 10, rows)

    before = {
        "same": fingerprint(5, "x", "abc"),
        "moved": fingerprint(5, "x", "abc"),
        "file": fingerprint(5, "x", "abc"),
    }
    before |= {"rule": fingerprint(5, "x", "abc"), "gone": fingerprint(5, "x", "abc")}
    now = {
        "same": fingerprint(5, "x", "abc"),
        "moved": fingerprint(5, "x", "abc", "b.jsonl"),
        "file": fingerprint(6, "y", "abcd"),
    }
    now |= {"rule": fingerprint(5, "x", "ab"), "new": fingerprint(5, "x", "abc")}
    assert source_changes(before, now) == [
        "source new: was not there before",
        "source gone: is no longer there",
        "source file (a.jsonl): 5 -> 6 bytes, 10 -> 10 rows, 3 -> 4 of them usable",
        "source rule (a.jsonl): the file is the same, what makes a row usable changed, 10 -> 10 rows, 3 -> 2 of them usable",
    ]
    restored = SourceFingerprint.model_validate_json(now["file"].model_dump_json())
    assert source_changes({"file": restored}, {"file": now["file"]}) == []
