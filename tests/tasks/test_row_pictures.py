"""Rows with pictures, from their file to the tokens of their prompt: usable, or set aside with a reason."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.connectors.huggingface.tiny_vision import build_tiny_vision, build_tokenizer, mark
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.storage.images import ImageError, Picture
from millrace.core.config import RunConfig
from millrace.core.config.data import Data, Source
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts.images import image_names
from millrace.core.contracts.rows.prompts import Quarantined
from millrace.core.families.images import image_rules
from millrace.flows.preflight.check_data import check_rows
from millrace.flows.preflight.check_model import ReadModel
from millrace.flows.preflight.first_rows import CheckedRows
from millrace.tasks.data import images
from millrace.tasks.data.images import HeldPictures, RowPictures
from millrace.tasks.data.prompt_dataset import load_prompts
from millrace.tasks.data.rows import DrawnRows, UsablePrompt
from tests.support.noise import as_file, noise

SIDE = 28
PAD, START, END = (mark(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> RowPictures:
    folder = build_tiny_vision(tmp_path_factory.mktemp("model"), "qwen2_5_vl")
    return RowPictures(image_rules(str(folder)), 6)


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(build_tokenizer())


def write(folder: Path, rows: list[dict[str, Any]]) -> Source:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(name="shapes", path=str(folder / "rows.jsonl"), images_key="images")


def test_a_picture_has_as_many_tokens_as_it_takes(
    tmp_path: Path, pictures: RowPictures, tokenizer: PromptTokenizer
) -> None:
    (tmp_path / "a.png").write_bytes(as_file(noise(3 * SIDE, 2 * SIDE)))
    (tmp_path / "large.png").write_bytes(as_file(noise(900, 900)))
    source = write(
        tmp_path,
        [
            {"prompt": "<image>how many?", "images": ["a.png"]},
            {"prompt": "a<image>b<image>", "images": ["a.png", "large.png"]},
            {"prompt": "2+3="},
        ],
    )
    found = load_prompts(source, tokenizer, 100, images=pictures)
    assert not found.quarantined
    one, two, none = found.usable
    assert one.tokens[1:9] == [START, *[PAD] * 6, END]
    assert two.tokens.count(PAD) == 6 + 4
    assert PAD not in none.tokens
    assert none.pictures == ()
    assert image_names(one.row.prompt) == [picture.name for picture in one.pictures]
    assert one.pictures[0] == two.pictures[0]
    assert (two.pictures[1].width, two.pictures[1].height) == (2 * SIDE, 2 * SIDE)


def test_bytes_of_a_table_are_read_as_public_sets_have_them(
    tmp_path: Path, pictures: RowPictures, tokenizer: PromptTokenizer
) -> None:
    rows = [
        {"problem": "<image>?", "images": [{"bytes": as_file(noise(60, 60, seed)), "path": f"{seed}.png"}]}
        for seed in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    held_out = EvalSet(
        name="held", path=str(tmp_path / "rows.parquet"), prompt_key="problem", images_key="images"
    )
    found = load_prompts(held_out, tokenizer, 100, images=pictures)
    assert [prompt.tokens.count(PAD) for prompt in found.usable] == [4, 4, 4]
    assert len({prompt.row.prompt_id for prompt in found.usable}) == 3
    drawn = DrawnRows(
        Source(name="s", path=str(tmp_path / "rows.parquet"), prompt_key="problem", images_key="images"),
        Data(sources=[Source(path="x")]),
        tokenizer,
        skips_special=True,
        images=pictures,
    )
    read = drawn.read(None, [2, 0])
    assert [item.tokens for item in read if isinstance(item, UsablePrompt)] == [
        found.usable[2].tokens,
        found.usable[0].tokens,
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<image>?", "images": ["no.png"]}, "missing image: number 0: "),
        ({"prompt": "<image><image>", "images": ["a.png", "text.png"]}, "bad image: number 1: no picture of a kind"),
        ({"prompt": "<image>?", "images": ["half.png"]}, "bad image: number 0: "),
        ({"prompt": "<image>?", "images": ["strip.png"]}, "bad image: number 0: 2000 x 4 pixels"),
        ({"prompt": "<image>?<|image_pad|>", "images": ["a.png"]}, "bad image: the chat template writes 2 places for 1"),
        ({"prompt": "<|image_pad|>"}, "bad image: the chat template writes 1 places for 0"),
        ({"prompt": "<image><|video_pad|>", "images": ["a.png"]}, "bad image: the text has the token that stands for a film"),
        ({"prompt": "<image>" * 30, "images": ["a.png"] * 30}, "too long: "),
    ],
)  # fmt: skip
def test_a_row_whose_pictures_cannot_be_used_is_set_aside(
    tmp_path: Path, pictures: RowPictures, tokenizer: PromptTokenizer, row: dict[str, Any], reason: str
) -> None:
    file = as_file(noise(60, 60))
    files = {"a.png": file, "text.png": b"hello", "half.png": file[: len(file) // 2]}
    files["strip.png"] = as_file(noise(2000, 4))
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    source = write(tmp_path, [row, {"prompt": "<image>?", "images": ["a.png"]}])
    found = load_prompts(source, tokenizer, 100, images=pictures)
    assert [item.row.row for item in found.usable] == [1]
    (refused,) = found.quarantined
    assert isinstance(refused, Quarantined)
    assert refused.reason.startswith(reason), refused.reason


def test_a_check_counts_each_row_with_its_own_pictures(
    tmp_path: Path, make_config: Callable[..., RunConfig]
) -> None:
    """A row that is set aside for its stops takes its pictures with it."""
    model = build_tiny_vision(tmp_path / "model", "qwen2_5_vl")
    (tmp_path / "a.png").write_bytes(as_file(noise(3 * SIDE, 2 * SIDE)))
    source = write(
        tmp_path,
        [
            {"prompt": "<image>?", "images": ["a.png"], "label": "1", "own": {"stop": ["x<eos>"]}},
            {"prompt": "2+3=", "label": "5", "own": {"stop": ["y"]}},
        ],
    ).model_copy(update={"sampling_key": "own", "chat": False})
    values = {"sources": [source.model_dump()], "max_prompt_tokens": 50}
    config = make_config(model={"path": str(model)}, data=values, trainer={"kind": "fsdp"})
    rows = CheckedRows("data.sources.shapes", source)
    assert not [*rows.read()]
    tokenizer = build_tokenizer().backend_tokenizer
    assert not [*check_rows(config, rows, ReadModel(tokenizer=tokenizer, here=config))]
    assert [row.row for row in rows.usable] == [1]
    assert rows.pictured == [0]


def test_a_picture_that_is_asked_for_again_is_not_read_again(
    tmp_path: Path, pictures: RowPictures, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an unused reserve are drawn again, and their files may be far away."""
    reads: list[Any] = []
    read_given = images.read_given
    monkeypatch.setattr(
        images, "read_given", lambda given, base: reads.append(given) or read_given(given, base)
    )
    own = RowPictures(pictures.rules, 6)
    url = "data:image/png;base64," + base64.b64encode(as_file(noise(SIDE, SIDE, 7))).decode()
    file = as_file(noise(2 * SIDE, SIDE, 8))
    (tmp_path / "a.png").write_bytes(file)
    given = ["a.png", url, file]
    first = [own._picture(each, str(tmp_path)) for each in given]
    assert reads == given
    assert [own._picture(each, str(tmp_path)) for each in given] == first
    assert reads == given
    with pytest.raises(ImageError, match="missing image"):
        own._picture("a.png", str(tmp_path / "elsewhere"))


def test_held_pictures_have_a_limit_and_the_newest_stay() -> None:
    held = HeldPictures(100)
    made = [Picture(str(number), 1, 1, bytes(40)) for number in range(3)]
    for number, each in enumerate(made):
        held.add((None, str(number)), each)
        held.get((None, "0"))
    assert held.get((None, "0")) == made[0]
    assert held.get((None, "1")) is None
    assert held.get((None, "2")) == made[2]
    held.add((None, "large"), Picture("large", 1, 1, bytes(101)))
    assert held.get((None, "large")) is None
    held.add((None, "0"), made[0])
    held.add((None, "0"), made[0])
    held.add((None, "1"), made[1])
    assert held.get((None, "0")) == made[0]
