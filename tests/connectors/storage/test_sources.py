"""Reading sources: thousands of bad rows cost nothing but themselves, on every kind of storage."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.connectors.storage import prompts, store
from millrace.connectors.storage.prompts import fingerprint, read_source
from millrace.connectors.storage.store import Store
from millrace.core.config.data import Source
from millrace.core.contracts.rows.prompts import PromptRow, source_changes
from millrace.core.errors import DataError
from millrace.core.hooks.protocols import RewardInput
from millrace.core.rewards.scoring import score_sample

BAD = {
    "not JSON": b'{"prompt": "1 + 1 =", "label"',
    "missing key": b'{"question": "1 + 1 =", "label": "2"}',
    "empty prompt": b'{"prompt": "", "label": "2"}',
    "not UTF-8": b'{"prompt": "1 + 1 = \xc3\x28", "label": "2"}',
    "wrong type": b'{"prompt": 17, "label": "2"}',
    "bad message": b'{"prompt": [{"role": "user"}], "label": "2"}',
    "not an object": b'["1 + 1 =", "2"]',
    "empty line": b"",
}


def good(number: int) -> bytes:
    return json.dumps({"prompt": f"{number} + 1 =", "label": str(number + 1)}).encode()


def test_1000_malformed_rows_among_10000_are_quarantined_with_reasons_and_the_others_come_through(
    root: str,
) -> None:
    chance = random.Random(0)
    bad = {row: chance.choice(list(BAD)) for row in chance.sample(range(9_999), 1_000)}
    lines = [BAD[bad[row]] if row in bad else good(row) for row in range(10_000)]
    Store(root).write("set.jsonl", b"\n".join(lines) + b"\n")
    rows, quarantined = read_source(Source(path=Store(root).url_of("set.jsonl")))
    assert len(rows) == 9_000
    assert [row.row for row in rows] == [row for row in range(10_000) if row not in bad]
    assert all((row.prompt, row.label) == (f"{row.row} + 1 =", str(row.row + 1)) for row in rows)
    assert len({row.prompt_id for row in rows}) == 9_000
    assert {item.row: item.reason.split(":")[0] for item in quarantined} == bad
    assert Counter(item.reason.split(":")[0] for item in quarantined) == Counter(bad.values())
    assert [item.row for item in quarantined] == sorted(bad)


def test_lines_are_the_same_whatever_the_blocks_they_come_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"\n".join(good(number) for number in range(50)) + b"\n\n" + good(51)
    (tmp_path / "set.jsonl").write_bytes(data)
    source = Source(path=str(tmp_path / "set.jsonl"))
    whole = read_source(source)
    assert [item.reason for item in whole[1]] == ["empty line"]
    assert len(whole[0]) == 51
    for size in (1, 7, 64, len(data) - 1, len(data)):
        monkeypatch.setattr(store.Store.blocks, "__defaults__", (size,))
        assert read_source(source) == whole


def test_a_path_without_a_folder_lies_where_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set.jsonl").write_bytes(good(1))
    monkeypatch.chdir(tmp_path)
    assert len(read_source(Source(path="set.jsonl"))[0]) == 1


def write_parquet(root: str, table: pa.Table) -> Source:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=1_500)
    Store(root).write("set.parquet", bytes(sink.getvalue()))
    return Source(path=Store(root).url_of("set.parquet"))


def test_parquet_rows_are_read_with_messages_labels_and_metadata(root: str) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number}", "name": None}],
            "label": [number],
            "metadata": {"level": number % 3},
            "unused": "x",
        }
        for number in range(4_000)
    ]
    rows[1_700]["prompt"] = None
    found, quarantined = read_source(write_parquet(root, pa.Table.from_pylist(rows)))
    assert len(found) == 3_999
    assert (found[5].prompt, found[5].label, found[5].metadata) == (
        [{"role": "user", "content": "5"}],
        [5],
        {"level": 2},
    )
    assert [(item.row, item.reason.split(":")[0]) for item in quarantined] == [(1_700, "wrong type")]


def test_parquet_rows_that_are_not_utf_8_are_quarantined_alone(root: str) -> None:
    texts = [f"{number} + 1 =".encode() for number in range(3_000)]
    for bad in (0, 1_499, 2_999):
        texts[bad] = b"\xff\xfe"
    binary = pa.array(texts, pa.binary())
    column = pa.StringArray.from_buffers(len(binary), *binary.buffers()[1:])
    found, quarantined = read_source(write_parquet(root, pa.table({"prompt": column})))
    assert len(found) == 2_997
    assert [(item.row, item.reason.split(":")[0]) for item in quarantined] == [
        (row, "not UTF-8") for row in (0, 1_499, 2_999)
    ]


def test_a_source_that_cannot_be_read_at_all_is_named_with_a_remedy(root: str) -> None:
    url = Store(root).url_of
    with pytest.raises(DataError, match=r"source s: .*none\.jsonl: no such file; correct the source's path"):
        read_source(Source(name="s", path=url("none.jsonl")))
    with pytest.raises(DataError, match=r"none\.parquet: no such file"):
        read_source(Source(path=url("none.parquet")))
    with pytest.raises(DataError, match=r"set\.csv: unknown format; give a file that ends in \.jsonl"):
        read_source(Source(path=url("set.csv")))
    source = write_parquet(root, pa.table({"question": ["a"]}))
    with pytest.raises(DataError, match=r"has no column prompt, only question; set the source's prompt_key"):
        read_source(source)
    data = Store(root).read("set.parquet")
    Store(root).write("set.parquet", data[: len(data) // 2])
    with pytest.raises(DataError, match=r"set\.parquet: not a whole Parquet file"):
        read_source(source)


def test_a_source_that_changed_is_noticed_and_what_changed_is_named(root: str) -> None:
    lines = [good(number) for number in range(100)]
    source = Source(name="s", path=Store(root).url_of("set.jsonl"))

    def taken(lines: list[bytes], longest: int = 100) -> prompts.SourceFingerprint:
        Store(root).write("set.jsonl", b"\n".join(lines))
        rows, quarantined = read_source(source)
        return fingerprint(source, [row for row in rows if _length(row) <= longest], quarantined)

    first = taken(lines)
    assert (first.rows, first.usable, first.size) == (100, 100, len(b"\n".join(lines)))
    assert source_changes({"s": first}, {"s": taken(lines)}) == []
    [said] = source_changes({"s": first}, {"s": taken([*lines, good(100)])})
    assert "100 -> 101 rows, 100 -> 101 of them usable" in said
    assert set(first.model_dump()) == {"path", "size", "sha256", "rows", "usable", "usable_sha256"}
    [said] = source_changes({"s": first}, {"s": taken(lines, longest=5)})
    assert "the file is the same, what makes a row usable changed" in said


def _length(row: PromptRow) -> int:
    return len(str(row.prompt))


VERL = {  # a row as verl's preprocessing writes it
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "48/2+48="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "48/2=24, 24+48=72"},
}


def graded(sample: RewardInput) -> float:
    """A reward that reads all that the row brings."""
    assert sample.metadata == {
        "style": "rule",
        "ground_truth": "72",
        "data_source": "openai/gsm8k",
        "extra_info.index": 0,
    }
    return float(sample.response == sample.label)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_rows_as_verl_writes_them_bring_label_and_further_columns_to_the_reward(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"train.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist([VERL]), path)
    else:
        path.write_text(json.dumps(VERL) + "\n")
    source = Source(
        path=str(path),
        label_key="reward_model.ground_truth",
        metadata_key="reward_model",
        extra_keys=["data_source", "extra_info.index"],
    )
    (row,), quarantined = read_source(source)
    assert (row.prompt, row.label, quarantined) == (VERL["prompt"], "72", [])
    stored = {
        "prompt": json.dumps(row.prompt),
        "label": json.dumps(row.label),
        "metadata": json.dumps(row.metadata),
        "response": "72",
        "response_length": 2,
        "status": "completed",
    }
    assert score_sample(f"{__name__}:graded", {}, stored)["reward"] == 1.0


def test_a_dotted_prompt_key_is_found_in_a_column(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"task": {"prompt": "1+1="}}]), tmp_path / "set.parquet")
    path = str(tmp_path / "set.parquet")
    (row,), _ = read_source(Source(path=path, prompt_key="task.prompt", label_key=None))
    assert row.prompt == "1+1="
    with pytest.raises(DataError, match="has no column question"):
        read_source(Source(path=path, prompt_key="question.text"))
