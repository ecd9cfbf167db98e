"""Stored token ids as text, with figures by token. Nothing is tokenised here: ids are shown as they were trained.

Owns where a run's vocabulary is found and how bytes of several tokens become one character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.contracts.sample import PolicySpan
from millrace.core.errors import MissingFileError, StorageError

FILE = "tokenizer.json"
UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no whole character
LONGEST = 4  # tokens of one character


@dataclass(frozen=True)
class TokenRow:
    """The tokens of a sample: a value by token in each list, the prompt's first. None: no figure of that kind for the token."""

    ids: list[int]
    texts: list[str] | None  # None if the run's vocabulary is not found
    prompt: int  # tokens of the prompt
    first: int  # number of the first token here
    count: int  # tokens of the sample
    values: dict[str, list[float | None]]
    missing: dict[str, str]  # figures that are not there, with the reason


def vocabulary(folder: RunFolder, settings: Mapping[str, Any]) -> Tokenizer | None:
    """The run's tokenizer: of its newest export, else of the tokenizer's or model's folder. None if neither has tokenizer.json."""
    for name in reversed(folder.store.folders("exports")):
        try:
            return _parsed(folder.store.read(f"exports/{name}/{FILE}"))
        except MissingFileError:
            continue
    model = settings.get("model", {})
    for path in (model.get("tokenizer"), model.get("path")):
        file = Path(path or "", FILE)
        if path and file.is_file():
            return _parsed(file.read_bytes())
    return None


def _parsed(content: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise StorageError(
            f"is no tokenizer: {error}", where=FILE, remedy="restore it from a copy"
        ) from error


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token. A character of several tokens is the text of the first, and the others have none."""
    found: list[str] = []
    at = 0
    while at < len(ids):
        for many in range(1, LONGEST + 1):
            text = tokenizer.decode(ids[at : at + many], skip_special_tokens=False)
            if UNFINISHED not in text or at + many >= len(ids):
                break
        else:
            many, text = 1, tokenizer.decode(ids[at : at + 1], skip_special_tokens=False)
        found += [text, *[""] * (many - 1)]
        at += many
    return found[: len(ids)]


def by_token(spans: Sequence[PolicySpan], length: int) -> list[float | None]:
    """The weight version that generated each response token."""
    values: list[float | None] = [None] * length
    for number, span in enumerate(spans):
        end = spans[number + 1]["first_token"] if number + 1 < len(spans) else length
        for at in range(span["first_token"], min(end, length)):
            values[at] = span["version"]
    return values
