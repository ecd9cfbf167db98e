"""The files beside an export's weights: with them another program answers as the run did.

Owns which come from the model's folder, and which from another tokenizer's folder or chat template that the run was given.
Knows nothing of weights.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from millrace.core.families.tokenizer_file import name_ends
from millrace.core.families.weight_files import INDEX
from millrace.core.plain_text import json_text

# with the code of models and tokenizers that transformers does not have; nothing here runs it
SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "tokenizer*", "*.py")
OF_TOKENIZER = (
    *("tokenizer*", "tokenization*", "*.jinja", "*.model", "*.tiktoken", "*.txt", "vocab.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.json"),
)
TEMPLATE, FORMER_TEMPLATE = "chat_template.jinja", "chat_template.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Served:
    """How the run asked its engines, as far as files hold it. ends: tokens that end its answers, besides those files name.

    tokenizer: its folder; None: the model's. chat_template: its text; None: the tokenizer's.
    """

    ends: Sequence[int] = ()
    tokenizer: str | None = None
    chat_template: str | None = None


ALONE = Served()  # the model alone


def write_side_files(folder: Path, model: str, served: Served) -> None:
    """Copy the other files of the model's folder, with the tokenizer and the template of the run."""
    for path in _found(model, served.tokenizer):
        if path.is_file() and path.name != INDEX and not (folder / path.name).exists():
            shutil.copy(path, folder / path.name)
    if served.chat_template is not None:
        _name_template(folder, served.chat_template)
    name_ends(folder, served.ends)


def name_dtype(path: Path, dtype: str) -> None:
    """Write the weights' type into a config.json, under the keys that it already uses; otherwise under transformers 5's key.

    Weights that were quantised are written in that type, so that how they were goes.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    # a checkpoint that also sees pictures may name it for its language model
    places = [
        (part, key)
        for part in (config, config.get("text_config"))
        if isinstance(part, dict)
        for key in ("dtype", "torch_dtype")
        if key in part
    ]
    for part, name in places or [(config, "dtype")]:
        part[name] = dtype
    path.write_text(json_text(config, indent=2) + "\n", encoding="utf-8")


def _found(model: str, tokenizer: str | None) -> Iterator[Path]:
    for pattern in SIDE_FILES:
        if tokenizer is None:
            yield from Path(model).glob(pattern)
            continue
        yield from (path for path in Path(tokenizer).glob(pattern) if _is_tokenizers(path.name))
        yield from (path for path in Path(model).glob(pattern) if not _is_tokenizers(path.name))


def _is_tokenizers(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in OF_TOKENIZER)


def _name_template(folder: Path, text: str) -> None:
    """Write this template to all places from which programs read one."""
    (folder / TEMPLATE).write_text(text, encoding="utf-8")
    (folder / FORMER_TEMPLATE).unlink(missing_ok=True)
    path = folder / TOKENIZER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "chat_template" in config:
        path.write_text(json_text({**config, "chat_template": text}, indent=2) + "\n", encoding="utf-8")
