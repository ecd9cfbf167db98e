"""How text becomes tokens with a model's tokenizer: nothing is truncated, padded, or added after a text.

A tokenizer may put special tokens around every text. Tokens before a text open a prompt of plain text. A token after it, mostly
the end of the sequence, would end the prompt before its answer starts, so none is added.
"""

import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# every vocabulary has a token for some of these characters
PROBE = f"{string.printable}一"

Encode = Callable[[str, bool], Sequence[int]]
"""Token ids of a text; with the special tokens around it, or without."""


def load_tokenizer_file(path: Path) -> Any:
    """A tokenizer.json, without the padding and truncation that were saved in it. Raises what the tokenizers library raises."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def before_text(encode: Encode) -> list[int]:
    """The token ids that a tokenizer puts before every text."""
    plain, whole = list(encode(PROBE, False)), list(encode(PROBE, True))
    at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), None)
    assert plain, "the vocabulary has no token for any of them"
    assert at is not None, "special tokens stand around a text, not in it"
    return whole[:at]


def before_text_of(tokenizer: Any) -> list[int]:
    """The token ids that a tokenizer of the tokenizers library puts before every text."""
    return before_text(lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids)


GENERATION, CONFIG = "generation_config.json", "config.json"
# transformers reads these keys of config.json instead
OF_GENERATION = ("bos_token_id", "pad_token_id")


def engine_ends(folder: str | Path) -> list[int]:
    """Ids of the tokens at which engines stop by themselves. Empty if neither file names one."""
    for name in (GENERATION, CONFIG):
        eos = _read(Path(folder) / name).get("eos_token_id")
        if eos is not None:
            return [int(token) for token in eos] if isinstance(eos, list) else [int(eos)]
    return []


def name_ends(folder: Path, ends: Sequence[int]) -> None:
    """Make programs that generate from this folder stop at these tokens too."""
    named = engine_ends(folder)
    every = list(dict.fromkeys([*named, *ends]))
    if every == named:
        return
    path, config = folder / GENERATION, _read(folder / CONFIG)
    taken = {name: config[name] for name in OF_GENERATION if config.get(name) is not None}
    values = _read(path) if path.is_file() else taken
    # with this key transformers would take config.json's tokens
    values.pop("_from_model_config", None)
    values["eos_token_id"] = every if len(every) > 1 else every[0]
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = json.loads(path.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else {}
