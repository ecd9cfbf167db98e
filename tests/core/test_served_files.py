"""With the tokenizer of an export another program makes of a chat what the run made of it, wherever the run's came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from millrace.connectors.engines.embedded.text import Text
from millrace.connectors.huggingface.template import TokenizerFolder
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.config.model import Model
from millrace.core.families.served_files import Served, write_side_files
from millrace.core.families.tokenizer_file import engine_ends

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "17+48="}]
OWN = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}<eos>{% endfor %}<assistant>é"


def in_jinja(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text)


def in_config(folder: Path, text: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": text}))


def in_former_file(folder: Path, text: str) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))


def nowhere(folder: Path, text: str) -> None:
    pass


PLACES: dict[str, Callable[[Path, str], None]] = {
    place.__name__: place for place in (in_jinja, in_config, in_former_file, nowhere)
}


def folder_with(path: Path, place: str, tools: bool) -> Path:
    """A model's folder whose template stands in one of the places. tools: another vocabulary and template."""
    build_tokenizer(tools).save_pretrained(path)
    text = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").unlink()
    PLACES[place](path, text)
    (path / "config.json").write_text(json.dumps({"eos_token_id": 1, "of": path.name}))
    (path / "generation_config.json").write_text(json.dumps({"of": path.name}))
    (path / "model.safetensors.index.json").write_text("{}")
    return path


@pytest.mark.parametrize("own", [False, True], ids=["its template", "a template of the run"])
@pytest.mark.parametrize(
    "other", [None, *PLACES], ids=lambda place: f"tokenizer with template {place}" if place else ""
)
@pytest.mark.parametrize("place", PLACES)
def test_an_export_has_the_tokenizer_of_the_run(
    tmp_path: Path, place: str, other: str | None, own: bool
) -> None:
    model = folder_with(tmp_path / "model", place, tools=False)
    tokenizer = str(folder_with(tmp_path / "other", other, tools=True)) if other else None
    template = tmp_path / "own.jinja"
    template.write_text(OWN)
    of_run = Model(path=str(model), tokenizer=tokenizer, chat_template=str(template) if own else None)
    export = tmp_path / "export"
    export.mkdir()
    write_side_files(export, str(model), Served([1, 7], tokenizer, OWN if own else None))

    before, after = PromptTokenizer.load(of_run).tokenizer, AutoTokenizer.from_pretrained(export)
    assert after.get_vocab() == before.get_vocab()
    assert after.chat_template == before.chat_template
    if before.chat_template:
        assert after.apply_chat_template(CHAT, add_generation_prompt=True) == before.apply_chat_template(
            CHAT, add_generation_prompt=True
        )
    assert TokenizerFolder(str(export)).template() == before.chat_template
    assert Text(export).eos == {1, 7}
    assert engine_ends(export) == [1, 7]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((export / name).read_text())["of"] == "model"
    assert not (export / "model.safetensors.index.json").exists()
