"""Sources whose rows are read as they are drawn: the same rows as of a source read whole, and what cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.storage.prompts import read_source
from millrace.connectors.storage.sources.addressed import AddressedRows
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.config.data import Source
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined
from millrace.core.errors import DataError
from millrace.flows.preflight.first_rows import CheckedRows
from millrace.tasks.data.prompt_dataset import PromptDataset
from millrace.tasks.data.rows import UsablePrompt

ROWS = 2500
BAD = {7, 1030, 2499}


def rows(bad: set[int] = BAD) -> list[dict[str, Any]]:
    return [
        {"prompt": " " if number in bad else f"{number}+1=", "label": str(number + 1)}
        for number in range(ROWS)
    ]


def write_jsonl(folder: Path) -> str:
    lines = [json.dumps(row) for row in rows()]
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())  # no newline at the end
    return str(folder / "rows.jsonl")


def write_parquet(folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist(rows()), folder / "rows.parquet", row_group_size=700)
    return str(folder / "rows.parquet")


def write_folder(folder: Path) -> str:
    there = folder / "parts"
    there.mkdir()
    pq.write_table(pa.Table.from_pylist(rows()[:900]), there / "a.parquet")
    (there / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()[900:2000]))
    (there / "c.jsonl").write_text("")
    pq.write_table(pa.Table.from_pylist(rows()[2000:]), there / "d.parquet")
    return str(there)


def write_saved(folder: Path) -> str:
    there = folder / "saved"
    there.mkdir()
    table = pa.Table.from_pylist(rows())
    with pa.ipc.new_stream(there / "data-0.arrow", table.schema) as writer:
        writer.write_table(table)
    (there / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    return str(there)


FILES: dict[str, Callable[[Path], str]] = {
    "lines": write_jsonl,
    "Parquet": write_parquet,
    "a folder": write_folder,
    "a saved data set": write_saved,
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("part", ["", "@[100:2000]", "@[-1500:]", "@[:8]"])
def test_every_row_is_the_one_of_the_source_read_whole(tmp_path: Path, kind: str, part: str) -> None:
    source = Source(name="a", path=FILES[kind](tmp_path) + part)
    usable, refused = read_source(source)
    whole = {item.row: item for item in [*usable, *refused]}
    addressed = AddressedRows(source)
    first = min(whole)
    assert len(addressed) == len(whole)
    wanted = [
        number * 389 % len(whole) for number in range(len(whole))
    ]  # in another order, some of them twice
    found = addressed.read(wanted)
    assert found == [whole[first + number] for number in wanted]


LINES = b"".join(b'{"prompt": "%d+1="}\n' % number for number in range(1000, 1000 + ROWS))
REPLACED = {
    "other rows of the same length": LINES.replace(b"1+1=", b"1+2="),
    "the same rows in another order": b"".join(reversed(LINES.splitlines(keepends=True))),
    "longer rows": LINES.replace(b"+", b" + "),
    "fewer rows": LINES[: len(LINES) // 2],
    "nothing": b"",
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_row_of_a_file_that_was_replaced_is_named(tmp_path: Path, how: str) -> None:
    """Whatever stood at the row's place in the new file was taken for the row."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES)
    addressed = AddressedRows(Source(name="a", path=str(path)))
    whole = addressed.read(range(ROWS))
    aside = tmp_path / "new"
    aside.write_bytes(REPLACED[how])
    aside.replace(path)
    with pytest.raises(DataError, match=rf"row 2401 of {path} has changed .* started") as error:
        addressed.read([2401])
    assert error.value.where == f"source a: {path}"
    path.write_bytes(LINES)  # the first remedy
    assert addressed.read(range(ROWS)) == whole
    path.write_bytes(REPLACED[how])
    assert (
        "data.allow_changes=true" in error.value.remedy
    )  # the second: what opens it again reads what it holds
    again = AddressedRows(Source(name="a", path=str(path)))
    assert len(again.read(range(len(again)))) == REPLACED[how].count(b"\n")


def test_rows_longer_than_the_blocks_of_a_scan_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checksum goes on over blocks: those without a newline, and one that begins or ends with it."""
    path = tmp_path / "rows.jsonl"
    texts = ["1" * length for length in (1, 2, 40, 3, 200, 1, 17, 18, 19, 20)]
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    source = Source(name="a", path=str(path))
    for size in range(1, 60):
        monkeypatch.setattr(Store.blocks, "__defaults__", (size,))
        addressed = AddressedRows(source)
        found = addressed.read(range(len(addressed)))
        assert [item.prompt for item in found if isinstance(item, PromptRow)] == texts


def test_bytes_and_hashes_are_those_of_the_fingerprint(tmp_path: Path) -> None:
    config = configured(write_folder(tmp_path))
    drawn, whole = (
        PromptDataset(config(above), PromptTokenizer(build_tokenizer())).fingerprints()["a"]
        for above in (0, ROWS)
    )
    assert (drawn.size, drawn.sha256, drawn.files) == (whole.size, whole.sha256, whole.files)
    assert (drawn.streamed, drawn.usable, drawn.rows) == (True, ROWS, ROWS)
    assert (whole.streamed, whole.usable, whole.rows) == (False, ROWS - len(BAD), ROWS)


def configured(path: str, **data: Any) -> Callable[[int], RunConfig]:
    def config(above: int) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": {"name": "a", "iterations": 1},
                "model": {"path": "-"},
                "data": {"sources": [{"name": "a", "path": path}], "stream_above_rows": above, **data},
            }
        )

    return config


def test_a_row_is_tokenised_when_it_is_read_and_an_unusable_one_says_why(tmp_path: Path) -> None:
    config = configured(write_jsonl(tmp_path), max_prompt_tokens=8)(0)
    dataset = PromptDataset(config, PromptTokenizer(build_tokenizer()))
    read = dataset.read([("a", None, number) for number in (3, 7, 2000, 3)])
    assert [type(item) for item in read] == [UsablePrompt, Quarantined, Quarantined, UsablePrompt]
    assert isinstance(read[0], UsablePrompt)
    assert read[0] == read[3]
    assert read[0].row.label == "4"
    assert [item.reason.split(":")[0] for item in read if isinstance(item, Quarantined)] == [
        "empty prompt",
        "too long",
    ]


@pytest.mark.parametrize("above", [0, ROWS], ids=["drawn", "whole"])
@pytest.mark.parametrize("long", [[{"role": "user", "content": "1" * (3 << 20)}], "1" * (3 << 20)])
def test_a_row_of_megabytes_is_set_aside_without_its_tokens(
    tmp_path: Path, above: int, long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer takes a few hundred bytes of memory for each character: 50 MB of text ended the driver."""
    given = [{"prompt": long if number == 1 else f"{number}+1=", "label": "2"} for number in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, given)))
    seen: list[int] = []
    encode = PromptTokenizer.encode_prompts

    def counted(self: PromptTokenizer, prompts: Any, **options: Any) -> Any:
        seen.extend(len(str(prompt)) for prompt in prompts)
        return encode(self, prompts, **options)

    monkeypatch.setattr(PromptTokenizer, "encode_prompts", counted)
    config = configured(str(tmp_path / "rows.jsonl"))(above)
    dataset = PromptDataset(config, PromptTokenizer(build_tokenizer()))
    [refused] = dataset.sources["a"].quarantined
    assert (refused.row, refused.reason.partition(",")[0]) == (1, f"too long: {3 << 20} characters")
    assert len(seen) >= 4
    assert max(seen) < 100
    rows = CheckedRows("data.sources.a", config.data.sources[0])
    assert rows.read() == []
    assert rows.set_aside(config.data.max_prompt_tokens) == []
    assert (len(rows.usable), [item.row for item in rows.unusable]) == (4, [1])


def test_a_source_without_rows_says_so(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    path = f"{tmp_path / 'rows.jsonl'}@[5:]"
    config = configured(path)(0)
    with pytest.raises(DataError, match="source a: holds no rows; .* correct the slice"):
        PromptDataset(config, PromptTokenizer(build_tokenizer()))
    [problem] = CheckedRows("data.sources.a", config.data.sources[0]).read()
    assert (problem.field, problem.reason) == ("data.sources.a.path", "holds no rows")


def test_a_label_is_required_where_the_first_rows_have_one(tmp_path: Path) -> None:
    lines = [
        json.dumps({"prompt": "1+1=", **({} if number == 2200 else {"label": "2"})}) for number in range(ROWS)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    dataset = PromptDataset(configured(str(tmp_path / "rows.jsonl"))(0), PromptTokenizer(build_tokenizer()))
    (found,) = dataset.read([("a", None, 2200)])
    assert isinstance(found, Quarantined)
    assert found.reason.startswith("missing key: label")


def test_a_source_with_too_many_unusable_rows_stops_at_the_start_or_when_they_are_drawn(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    good, bad = json.dumps({"prompt": "1+1=", "label": "2"}), "{"
    path.write_text("\n".join([bad, good, bad] * 800))
    tokenizer = PromptTokenizer(build_tokenizer())
    with pytest.raises(
        DataError, match=r"667 of 1000 rows are unusable, more than data.max_quarantined_share = 0.5"
    ):
        PromptDataset(configured(str(path))(0), tokenizer)
    path.write_text("\n".join([good] * 1000 + [good, bad, bad] * 200 + [bad] * 1000))
    dataset = PromptDataset(configured(str(path))(0), tokenizer)
    dataset.read([("a", None, row) for row in range(1000, 2000)])
    with pytest.raises(DataError, match=r"1400 of 2600 rows are unusable.*not JSON"):
        dataset.read([("a", None, row) for row in range(2000, 2600)])


class Squares:
    """Rows of a level, made when they are asked for."""

    def __init__(self, level: int) -> None:
        self.level = level

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 13:
            raise ValueError("no luck")
        return {"prompt": f"{10**self.level + number}*1=", "label": str(number), "metadata": {"n": number}}


def squares(level: int = 0, *, worst: bool = False) -> Any:
    return {"a": 1} if worst else Squares(level)


def one_row() -> list[Any]:
    return [{"prompt": "1+1=", "label": "2"}, "text", {"prompt": object()}, {"label": "2"}]


def own(function: str, **source: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "a", "iterations": 1},
            "model": {"path": "-"},
            "data": {
                "sources": [{"name": "own", "rows": f"{__name__}:{function}", **source}],
                "max_quarantined_share": 0.8,
            },
        }
    )


def test_rows_of_a_function_are_made_in_a_process_of_their_own_by_level() -> None:
    tokenizer = PromptTokenizer(build_tokenizer())
    dataset = PromptDataset(own("squares", levels={"last": 3, "first": 1}), tokenizer)
    assert dataset.plans()["own"].rows == {1: 10**6, 2: 10**6, 3: 10**6}
    read = dataset.read([("own", 2, 5), ("own", 3, 999_999), ("own", 2, 13)])
    assert [item.row.prompt for item in read if isinstance(item, UsablePrompt)] == ["105*1=", "1000999*1="]
    assert isinstance(read[2], Quarantined)
    assert read[2].reason.startswith("raised: ValueError: no luck")
    again = PromptDataset(own("squares", levels={"last": 3, "first": 1}), tokenizer).fingerprints()["own"]
    assert again == dataset.fingerprints()["own"]
    assert again.levels == {1: 10**6, 2: 10**6, 3: 10**6}


def test_what_a_function_returns_that_is_no_row_is_unusable_with_the_reason() -> None:
    dataset = PromptDataset(own("one_row"), PromptTokenizer(build_tokenizer()))
    reasons = {item.row: item.reason.split(":")[0] for item in dataset.sources["own"].quarantined}
    assert reasons == {1: "not an object", 2: "wrong type", 3: "missing key"}


def test_a_function_that_returns_no_rows_is_named() -> None:
    config = own("squares")
    (source,) = config.data.sources
    assert source.rows is not None
    worst = source.model_copy(update={"rows": source.rows.model_copy(update={"options": {"worst": True}})})
    config = config.model_copy(update={"data": config.data.model_copy(update={"sources": [worst]})})
    with pytest.raises(DataError, match=r"it returned a dict; return a list of rows"):
        PromptDataset(config, PromptTokenizer(build_tokenizer()))
