"""A process that is told the class of the tokenizer loads the very one that transformers chooses, without what the choice imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.config.model import Model
from millrace.core.contracts.rows.chat_options import PLAIN
from millrace.core.errors import ConfigError
from millrace.tasks.shards.keeper import IMPORTS

TEXT = "Héllo, <|end|> 12 + 3 =\n  ok"
LETTERS = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
CLASSES = {"qwen2": Qwen2Tokenizer, "llama": LlamaTokenizer, "gpt2": GPT2Tokenizer, "tiny": None}


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


@pytest.mark.parametrize("name", CLASSES)
def test_told_its_class_a_process_of_shards_imports_little(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    kind = PromptTokenizer.load(Model(path=str(folder))).kind
    code = f"""
import sys
from importlib import import_module
for module in {IMPORTS!r}:
    import_module(module)
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.config.model import Model
PromptTokenizer.load(Model(path={str(folder)!r}), kind={kind!r})
print([name for name in ("torch", "sklearn", "pandas", "scipy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("kind", ["transformers.gone:Gone", "transformers:Gone"])
def test_a_class_that_is_not_here_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer Gone.*install the version of the driver"):
        PromptTokenizer.load(Model(path=str(tmp_path)), kind=kind)
