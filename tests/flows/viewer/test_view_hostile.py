"""Texts that attack their reader stay texts: in every answer, in every message, in a file that is exported."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from millrace.connectors.storage.images import StoredImages, opened, picture_of
from millrace.core.contracts.images import DATA_URL
from millrace.flows.viewer.answers import Viewer, as_json
from millrace.flows.viewer.export import exported
from millrace.flows.viewer.messages import conversation, spoken
from millrace.flows.viewer.stored import Problems
from tests.support.attacks import ATTACKS, dialogue
from tests.support.noise import noise
from tests.support.viewed_run import NAME, write_viewed_run

PICTURE = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Viewer:
    root = str(tmp_path_factory.mktemp("runs"))
    write_viewed_run(root, said=tuple(ATTACKS.values()))
    return Viewer(root, NAME)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_text_arrives_unchanged_and_as_text(viewer: Viewer, attack: str) -> None:
    text = ATTACKS[attack]
    number = list(ATTACKS).index(attack)
    found = json.loads(
        as_json(viewer.ask(NAME, "sample", {"iteration": "1", "sample": f"kept0-{number:04d}"}))
    )
    parts = found["messages"][-1]["parts"]
    assert {part["kind"] for part in parts} <= {"text", "thinking"}
    assert found["reward_texts"]["words"] == f"**judged** {text}"
    if "<think" not in text:
        assert [part["text"] for part in parts] == [text]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_message_of_a_model_is_a_picture(attack: str) -> None:
    row = {"prompt": json.dumps("2+3="), "dialogue": dialogue(ATTACKS[attack]), "response": ""}
    messages = conversation(row)
    kinds = {part.kind for message in messages for part in message.parts}
    assert kinds <= {"text", "thinking", "call"}
    assert [message.generated for message in messages] == [False, True, False, True]


def test_a_picture_that_the_data_gave_is_one_and_others_are_text() -> None:
    def parts(url: Any, role: str = "user") -> list[str]:
        prompt = [{"role": role, "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        return [part.kind for part in conversation({"prompt": json.dumps(prompt), "response": ""})[0].parts]

    assert parts(PICTURE) == ["picture"]
    svg = "data:image/svg+xml;base64,PHN2Zz4="
    for url in (
        "http://evil.test/x.png",
        svg,
        "data:text/html,x",
        "javascript:x",
        PICTURE + '" onerror="x',
        7,
        None,
    ):
        assert parts(url) == ["text"], url


def test_a_picture_of_the_run_is_shown_only_in_the_place_of_the_data() -> None:
    name = "ab" * 32
    shown = {name: PICTURE}.get

    def kinds(content: Any, role: str = "user", **row: Any) -> list[str]:
        prompt = json.dumps([{"role": role, "content": [content]}])
        messages = conversation({"prompt": prompt, "response": "", **row}, pictures=shown)
        return [part.kind for message in messages[:1] for part in message.parts]

    assert kinds({"type": "image", "image": name}) == ["picture"]
    for other in ("cd" * 32, f"../{name}", name.upper(), name + "\n", 7, None, [name]):
        assert kinds({"type": "image", "image": other}) == ["text"], other
    # what a model says in the same form is text
    said = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [{"type": "image", "image": name}]},
    ]
    row = {"prompt": json.dumps(said[:1]), "dialogue": json.dumps(said), "response": ""}
    messages = conversation(row, pictures=shown)
    assert [part.kind for message in messages for part in message.parts] == ["text", "text"]


def test_thinking_is_told_from_what_was_said() -> None:
    found = [(part.kind, part.text) for part in spoken("a<think>b</think>c<thinking>d")]
    assert found == [("text", "a"), ("thinking", "b"), ("text", "c"), ("thinking", "d")]
    assert [(part.kind, part.text) for part in spoken("")] == [("text", "")]


def test_half_characters_are_shown_as_escapes() -> None:
    row = {"prompt": json.dumps("\ud83d"), "dialogue": None, "response": "x"}
    assert conversation(row)[0].parts[0].text == "\\ud83d"


def test_a_file_that_is_exported_holds_two_scripts_whatever_was_said(viewer: Viewer) -> None:
    page = exported(viewer, 1, "kept0", None).decode()
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page
    assert "<iframe" not in page


def test_a_picture_is_shown_as_its_pixels_and_a_broken_one_is_a_problem(viewer: Viewer) -> None:
    run, problems = viewer.of(NAME).run, Problems()
    stored = StoredImages(run.folder.store)
    one, other = (picture_of(noise(8, 8, seed), (8, 8)) for seed in (1, 2))
    entries = stored.keep([one, other])
    show = run.pictures(problems)
    shown = show(one.name)
    assert shown is not None
    assert opened(base64.b64decode(shown.removeprefix(DATA_URL))).tolist() == opened(one.png).tolist()
    path = next(entry.path for entry in entries if other.name in entry.path)
    for content in (b"<svg onload='alert(1)'/>", one.png, other.png + b"<script>alert(1)</script>"):
        run.folder.store.write(path, content)
        found = run.pictures(problems)(other.name)
        # what follows the picture in its file is not shown
        assert found is None or b"script" not in base64.b64decode(found.removeprefix(DATA_URL))
    assert len(problems.listed()) == 2
    run.folder.store.remove(path)
    show = run.pictures(problems)
    assert show(other.name) is None
    assert show("cd" * 32) is None
