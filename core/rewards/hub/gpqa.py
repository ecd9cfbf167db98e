"""Multiple choice, as of GPQA (arXiv:2311.12022): which letter a response settles on. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from millrace.core.hooks import RewardInput, RewardResult

STATED = re.compile(
    r"(?i:\b(?:answer|option|choice)\b\s*(?:is|:)?\s*)[*(\[{$]{0,3}([A-Z])\b(?![''\w])"
    r"|(?<![\w'])([A-Z])[*)\]}$]{0,3}\s+(?i:is\s+(?:the\s+)?correct\b)"
)
ALONE = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")


def gpqa(sample: RewardInput, *, letters: str = "ABCD", choices_key: str = "choices") -> RewardResult:
    """1 if the response settles on the right letter, else 0; what stands before </think> does not count.

    The last statement counts (the answer is X, option X, choice X, X is correct), else the last letter that stands alone.
    The label is a letter, an index from 0, or the text of one of `metadata[choices_key]`. A response without a letter is
    right if it holds the text of the right choice.
    """
    text = sample.response.rpartition("</think>")[2]
    choices = sample.metadata.get(choices_key)
    texts = [str(choice) for choice in choices] if isinstance(choices, Sequence) else []
    letters = letters[: len(texts)] if texts else letters
    right = _right(sample.label, letters, texts)
    stated = [one or other for one, other in STATED.findall(text)]
    for found in (stated, ALONE.findall(text)):
        valid = [letter for letter in found if letter in letters]
        if valid:
            return RewardResult(float(valid[-1] == right), answer=valid[-1])
    chosen = texts[letters.index(right)] if texts else ""
    holds = bool(chosen.strip()) and chosen.casefold() in text.casefold()
    return RewardResult(float(holds), answer=right if holds else "")


def _right(label: Any, letters: str, choices: list[str]) -> str:
    """The letter of the label. Errors: ValueError for a label that is none: the data are wrong, not the response."""
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    plain = str(label).strip().strip("()").upper()
    if len(plain) == 1 and plain in letters:
        return plain
    folded = [choice.strip().casefold() for choice in choices]
    wanted = str(label).strip().casefold()
    if wanted in folded and folded.index(wanted) < len(letters):
        return letters[folded.index(wanted)]
    raise ValueError(f"label {str(label)[:40]!r} is no letter of {letters}, no index, and no choice")
