"""Keys that a table adds to an object because another row has them: rows are the same from a table as from lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.connectors.storage.prompts import first_rows, read_source
from millrace.connectors.storage.sources.addressed import AddressedRows
from millrace.connectors.storage.sources.formats import without_nulls_of_tables
from millrace.core.config.data import Source
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts.rows.chat_options import chat_options
from millrace.core.contracts.rows.prompts import PromptRow

ASKED = {"role": "user", "content": "3+4="}


def called(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [
        ASKED,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        },
    ]


def tool(name: str, **properties: Any) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
        }
    ]


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # two rows of a source, with keys that the other lacks
    "arguments of calls": ({"prompt": called("weather", city="Oslo")}, {"prompt": called("add", a=1, b=2)}),
    "no arguments": ({"prompt": called("now")}, {"prompt": called("add", a=1)}),
    "arguments within arguments": (
        {"prompt": called("find", where={"city": "Oslo"})},
        {"prompt": called("find", where={"day": 3, "at": {"hour": 1}}, most=2)},
    ),
    "objects in a list of an argument": (
        {"prompt": called("add", terms=[{"a": 1}, {"b": 2}])},
        {"prompt": called("add", terms=[{"c": 3}])},
    ),
    "keys of messages": (
        {"prompt": [{**ASKED, "name": "Ann"}, {"role": "assistant", "content": "7", "weight": 0}, ASKED]},
        {"prompt": [ASKED, {"role": "assistant", "content": "7", "reasoning_content": "Hm."}, ASKED]},
    ),
    "calls of a message": ({"prompt": [ASKED]}, {"prompt": called("add", a=1)}),
    "tools": ({"tools": tool("weather", city={"type": "string"})}, {"tools": tool("add", a={"type": "number", "minimum": 0})}),
    "tools that are none": ({"tools": []}, {"tools": tool("add", a={"type": "number"})}),
    "variables of the template": ({"vars": {"thinking": True}}, {"vars": {"style": {"length": 3}}}),
    "metadata": ({"metadata": {"level": 1, "of": {"book": "A"}}}, {"metadata": {"topic": "sums", "of": {"page": 3}}}),
    "metadata that is not there": ({"metadata": {"level": 1}}, {}),
    "a label": ({"label": {"sum": 7}}, {"label": {"parts": [{"a": 3}, {"b": 4}]}}),
    "further columns": ({"extra": {"index": 1}, "more": "x"}, {"extra": {"id": "a"}}),
    "sampling": ({"sampling": {"max_new_tokens": 3}}, {"sampling": {"stop": ["."]}}),
}  # fmt: skip
KEYS: dict[str, Any] = {
    "tools_key": "tools",
    "chat_template_kwargs_key": "vars",
    "sampling_key": "sampling",
    "extra_keys": ["extra", "more"],
}


def parquet(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def saved(path: Path, table: pa.Table) -> Path:
    """As save_to_disk writes it."""
    path.mkdir()
    with pa.OSFile(str(path / "data-0.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    return path


def plain(rows: list[PromptRow]) -> list[tuple[Any, Any, Any]]:
    return [(row.prompt, row.label, row.metadata) for row in rows]


@pytest.mark.parametrize("write", [parquet, saved])
@pytest.mark.parametrize("kind", [Source, EvalSet])
@pytest.mark.parametrize("name", PAIRS)
def test_rows_of_a_table_are_those_of_the_lines(
    tmp_path: Path, name: str, kind: type[Source] | type[EvalSet], write: Callable[[Path, pa.Table], Path]
) -> None:
    rows = [{"prompt": "3+4=", "label": "7", **each} for each in PAIRS[name]]
    if name == "a label":
        rows[1]["label"] = {"sum": 7, **rows[1]["label"]}
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    table = pa.Table.from_pylist(rows, schema=pa.Table.from_pylist([*rows, {"more": "x"}]).schema)
    path = write(tmp_path / "table", table)
    keys = {**KEYS, "name": "s"}
    if kind is EvalSet:
        keys = {key: value for key, value in keys.items() if key in EvalSet.model_fields}
    columns = set(table.schema.names)
    keys = {
        key: value
        for key, value in keys.items()
        if not isinstance(value, str) or value in columns or key == "name"
    }
    read = {place: kind.model_validate({**keys, "path": str(place)}) for place in (lines, path)}
    expected = plain(read_source(read[lines])[0])
    assert len(expected) == 2
    assert plain(read_source(read[path])[0]) == expected
    assert plain(first_rows(read[path], 9, 1 << 20).usable) == expected
    streamed = AddressedRows(read[path]).read([0, 1])
    assert plain([row for row in streamed if isinstance(row, PromptRow)]) == expected
    options = [chat_options(read[path], metadata) for _, _, metadata in expected]
    assert "null" not in json.dumps([[each.tools, each.template_kwargs] for each in options])


def test_nulls_of_lists_and_maps_and_of_json_text_stay(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            ("prompt", pa.string()),
            ("label", pa.list_(pa.int64())),
            ("metadata", pa.map_(pa.string(), pa.string())),
            ("tools", pa.string()),
        ]
    )
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"default": None}}}]
    values = {
        "prompt": "3+4=",
        "label": [1, None],
        "metadata": [("a", None), ("b", "x")],
        "tools": json.dumps(tools),
    }
    path = parquet(tmp_path / "rows", pa.Table.from_pylist([values], schema=schema))
    (row,), _ = read_source(Source(path=str(path), tools_key="tools"))
    assert row.label == [1, None]
    assert row.metadata == {"a": None, "b": "x", "tools": tools}


def test_nulls_are_left_out_of_objects_alone() -> None:
    held = {
        "a": None,
        "b": {"c": None, "d": [None, {"e": None, "f": 0}]},
        "g": [("h", None)],
        "i": [],
        "j": False,
    }
    assert without_nulls_of_tables(held) == {
        "b": {"d": [None, {"f": 0}]},
        "g": {"h": None},
        "i": [],
        "j": False,
    }
