"""The remembered class of a tokenizer is the one that transformers chooses, and loading it imports little."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from millrace.connectors.huggingface import tokenizer
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer, remember_kind, remembered_kind
from millrace.core.config.model import Model
from millrace.core.contracts.rows.chat_options import PLAIN
from millrace.core.errors import ConfigError
from millrace.tasks.shards.board import IMPORTS

KIND = "transformers.models.gpt2.tokenization_gpt2:GPT2Tokenizer"
TEXT = "Héllo, <|end|> 12 + 3 =\n  ok"
LETTERS = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
CLASSES = {"qwen2": Qwen2Tokenizer, "llama": LlamaTokenizer, "gpt2": GPT2Tokenizer, "tiny": None}


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MILLRACE_HOME in which no class is remembered."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))


def folder_of(name: str, folder: Path) -> Path:
    """A tokenizer's files beside the configuration of a model that has such ones."""
    made = CLASSES[name]
    vocabulary = {**LETTERS, "<unk>": len(LETTERS), "<s>": len(LETTERS) + 1, "</s>": len(LETTERS) + 2}
    tokenizer = made(vocab=vocabulary, merges=[]) if made else build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": name if made else "qwen3"}))
    return folder


@pytest.mark.parametrize("name", CLASSES)
def test_told_its_class_it_is_the_same_tokenizer(name: str, tmp_path: Path) -> None:
    model = Model(path=str(folder_of(name, tmp_path)))
    chosen = PromptTokenizer.load(model)
    told = PromptTokenizer.load(model, kind=chosen.kind)
    assert type(told.tokenizer) is type(chosen.tokenizer)
    ids = [each.encode_prompts([TEXT], chat=False) for each in (told, chosen)]
    assert ids[0] == ids[1]
    assert told.decode(ids[0][0]) == chosen.decode(ids[0][0])
    assert told.encode_response(TEXT, chat=True) == chosen.encode_response(TEXT, chat=True)
    assert told.tokenizer.get_vocab() == chosen.tokenizer.get_vocab()
    if chosen.tokenizer.chat_template:
        assert told.render(TEXT, chat=True, system=None, options=PLAIN) == chosen.render(
            TEXT, chat=True, system=None, options=PLAIN
        )


def test_a_process_that_is_told_the_class_or_finds_it_remembered_imports_little(tmp_path: Path) -> None:
    folders = {str(folder_of(name, tmp_path / name)): name for name in CLASSES}
    kinds = {folder: PromptTokenizer.load(Model(path=folder)).kind for folder in folders}
    code = f"""
import sys
from importlib import import_module
for module in {IMPORTS!r}:
    import_module(module)
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.config.model import Model
for folder, kind in {kinds!r}.items():
    for told in (kind, None):
        assert PromptTokenizer.load(Model(path=folder), kind=told).kind == kind
        print([name for name in ("torch", "sklearn", "pandas", "scipy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n" * 2 * len(CLASSES)), done.stderr


def choose_another_class(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "Qwen2Tokenizer"}))


def choose_by_another_family(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def add_a_file(folder: Path) -> None:
    (folder / "tekken.json").write_text("{}")


@pytest.mark.parametrize("change", [choose_another_class, choose_by_another_family, add_a_file])
def test_what_was_chosen_holds_for_the_same_files_alone(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = folder_of("gpt2", tmp_path / "model")
    assert remembered_kind(str(folder)) is None
    kind = PromptTokenizer.load(Model(path=str(folder))).kind
    assert remembered_kind(str(folder)) == kind
    shutil.copytree(folder, tmp_path / "copy")
    assert remembered_kind(str(tmp_path / "copy")) == kind
    change(folder)
    assert remembered_kind(str(folder)) is None


def test_versions_of_libraries_settle_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_kind(str(tmp_path), KIND)
    assert remembered_kind(str(tmp_path)) == KIND
    monkeypatch.setattr(tokenizer, "version", lambda name: "0.0.1")
    assert remembered_kind(str(tmp_path)) is None


def test_what_is_not_remembered(tmp_path: Path) -> None:
    for folder, kind in (
        ("gpt2", KIND),
        (str(tmp_path), "transformers_modules.own:Own"),
    ):
        remember_kind(folder, kind)
        assert remembered_kind(folder) is None


@pytest.mark.parametrize(
    "altered", ["antigravity:fly", "transformers_modules.own:Own", "transformers.a:b.c", ""]
)
def test_a_record_that_names_what_was_never_chosen_is_not_imported(altered: str, tmp_path: Path) -> None:
    remember_kind(str(tmp_path), KIND)
    (record,) = (tmp_path / "home" / "tokenizers").glob("[!.]*")
    record.write_text(altered)
    assert remembered_kind(str(tmp_path)) is None


def test_the_newest_records_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "KEPT", 2)
    folders = []
    for number in range(3):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "config.json").write_text(json.dumps({"number": number}))
        folders.append(str(tmp_path / f"{number}"))
        remember_kind(folders[-1], KIND)
        time.sleep(0.01)  # files of one moment have no order
    assert [remembered_kind(folder) is None for folder in folders] == [True, False, False]


@pytest.mark.parametrize("kind", ["transformers.gone:Gone", "transformers:Gone"])
def test_a_class_that_is_not_here_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer Gone.*install the version of the driver"):
        PromptTokenizer.load(Model(path=str(tmp_path)), kind=kind)
