"""Pictures in prompts: the forms that data has, their order, and what a request sends."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.config.data import Source
from millrace.core.contracts.images import (
    SentImage,
    SentImages,
    image_names,
    text_alone,
    with_words,
)
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, parse_row

SOURCE = Source(name="shapes", path="shapes.jsonl", images_key="images")
FILE = b"\x89PNG"


def parsed(**values: Any) -> PromptRow | Quarantined:
    return parse_row(values, 3, SOURCE)


@pytest.mark.parametrize(
    ("values", "content", "images"),
    [
        ({"prompt": "<image>how many?", "images": ["a.png"]}, ["#0", "how many?"], ("a.png",)),
        ({"prompt": "a<image>b<image>", "images": ["a", "b"]}, ["a", "#0", "b", "#1"], ("a", "b")),
        ({"prompt": "<image>?", "images": {"bytes": FILE, "path": None}}, ["#0", "?"], (FILE,)),
        ({"prompt": "<image>?", "images": [{"bytes": FILE, "path": "a.png"}]}, ["#0", "?"], (FILE,)),
        ({"prompt": "<image>?", "images": [{"path": "a.png"}]}, ["#0", "?"], ("a.png",)),
        ({"prompt": "<image>?", "images": "a.png"}, ["#0", "?"], ("a.png",)),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], "images": ["a"]},
            ["#0", "?"],
            ("a",),
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "text", "text": "?<image>"}]}], "images": ["a"]},
            ["#0", "?", "#1"],
            ("data:x", "a"),
        ),
    ],
)  # fmt: skip
def test_each_form_of_a_picture_takes_its_place(
    values: dict[str, Any], content: list[str], images: tuple[Any, ...]
) -> None:
    row = parsed(**values)
    assert isinstance(row, PromptRow), row
    (message,) = row.prompt
    assert isinstance(message, dict)
    parts = message["content"]
    assert [f"#{part['image']}" if part["type"] == "image" else part["text"] for part in parts] == content
    assert row.images == images
    named = row.with_images([f"{number}" * 64 for number in range(len(images))])
    assert image_names(named.prompt) == [f"{number}" * 64 for number in range(len(images))]
    assert named.images == ()
    assert named.prompt_id != row.prompt_id


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prompt": "how many?", "images": ["a"]}, "images do not match: the row has 1, and its prompt has 0"),
        ({"prompt": "<image><image>", "images": ["a"]}, "images do not match: the row has 1, and its prompt has places"),
        ({"prompt": "<image>", "images": None}, "images do not match: the row has 0"),
        ({"prompt": "<image>", "images": [7]}, "bad image: int"),
        ({"prompt": "<image>", "images": [b""]}, "bad image: empty"),
        ({"prompt": "<image>", "images": [{"width": 3}]}, "bad image: an object without bytes or path, only width"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]}, "not text: message 0"),
    ],
)  # fmt: skip
def test_a_row_whose_pictures_are_none_or_do_not_match_is_refused(
    values: dict[str, Any], reason: str
) -> None:
    row = parsed(**values)
    assert isinstance(row, Quarantined)
    assert row.reason.startswith(reason)
    assert "images" not in row.excerpt


def test_a_row_of_text_has_the_same_id_with_and_without_pictures_in_its_source() -> None:
    prompt = [{"role": "user", "content": "2+3="}]
    plain = parse_row({"prompt": prompt}, 3, SOURCE.model_copy(update={"images_key": None}))
    assert parsed(prompt=prompt) == plain
    assert parsed(prompt="2+3=", images=[]) == plain


def test_without_the_key_a_picture_is_refused_as_before() -> None:
    prompt = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    row = parse_row({"prompt": prompt}, 0, SOURCE.model_copy(update={"images_key": None}))
    assert isinstance(row, Quarantined)
    assert row.reason == "not text: message 0: part 0 is of type image, which a model of text cannot be shown"


def test_a_request_has_one_token_for_each_picture() -> None:
    sent = SentImages(9, (SentImage(b"a", 3), SentImage(b"b", 2)))
    assert sent.compressed([1, 9, 9, 9, 2, 9, 9, 3, 4]) == [1, 9, 2, 9, 3, 4]
    # two that follow each other are told apart by their counts
    assert sent.compressed([9, 9, 9, 9, 9, 7]) == [9, 9, 7]
    with pytest.raises(AssertionError):
        sent.compressed([1, 9, 9, 9, 2, 9, 9, 3, 9])
    assert sent.images[0].data_url == "data:image/png;base64,YQ=="


def test_readers_of_text_get_a_pictures_name_or_nothing() -> None:
    content = [{"type": "image", "image": "ab" * 32}, {"type": "text", "text": "how many?"}]
    assert with_words(content) == "(image abababab)how many?"
    assert text_alone(content) == "how many?"
    assert with_words("plain") == text_alone("plain") == "plain"
    assert text_alone(None) == ""
