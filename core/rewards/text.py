"""Rewards by comparing text, and characters that are written in many ways (ASCII, LaTeX, other scripts). Pure: strings in, numbers out."""

import re
import unicodedata
from typing import Any

from millrace.core.errors import DataError
from millrace.core.hooks.protocols import RewardInput, RewardResult


def exact_match(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> RewardResult:
    """1 if the response, which is the answer, is the label, else 0."""
    answer = _normal(sample.response, strip, ignore_case)
    return RewardResult(float(answer == _normal(sample.label, strip, ignore_case)), answer=answer)


def contains(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> float:
    """1 if the label occurs in the response, else 0; an empty label never does."""
    label = _normal(sample.label, strip, ignore_case)
    return float(bool(label) and label in _normal(sample.response, strip, ignore_case))


def label_text(label: Any) -> str:
    """A label as text for comparison with a response; empty without a label.

    Errors: DataError for a list or a mapping, which no response equals.
    """
    if isinstance(label, list | dict):
        raise DataError(
            f"it is a {type(label).__name__}, and the reward compares with text",
            where="label of the row",
            remedy="set label_key of the source to the text within it, as in label_key: label.answer",
        )
    return "" if label is None else str(label)


def _normal(text: Any, strip: bool, ignore_case: bool) -> str:
    plain = label_text(text)
    plain = plain.strip() if strip else plain
    return plain.casefold() if ignore_case else plain


SIGNS = {
    **dict.fromkeys("−–—‐‑‒﹣－⁻", "-"), "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "÷": "\\div ", "π": "\\pi ", "∞": "\\infty ",
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "°": "^\\circ ", "∅": "\\emptyset ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ",
    "∩": "\\cap ", "∈": "\\in ", "≈": "\\approx ", "√": "\\sqrt ", "→": "\\to ", "∼": "\\sim ", "⁄": "/", "∕": "/", "：": ":",
    "’": "'", "‘": "'", "“": '"', "”": '"', "′": "'", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℂ": "\\mathbb{C}", "ℕ": "\\mathbb{N}",
    "ℚ": "\\mathbb{Q}", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "λ": "\\lambda ", "µ": "u", "\u03a9": "ohm", "\u2126": "ohm",
}  # fmt: skip
NOT_ASCII = re.compile(r"[^\x00-\x7f]")
RAISED = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
LOWERED = re.compile(r"[₀-₎]+")


def plain(text: str) -> str:
    """The text with ASCII and LaTeX for all characters that these can write."""
    if text.isascii():
        return text
    text = RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0]).replace('−', '-')}}}", text)
    text = LOWERED.sub(
        lambda match: f"_{{{unicodedata.normalize('NFKC', match[0]).replace('−', '-')}}}", text
    )
    return NOT_ASCII.sub(lambda match: _plain(match[0]), text)


def minus_signs(text: str) -> str:
    """The text with ASCII for digits and signs of numbers, one character for one."""
    if text.isascii():
        return text
    return NOT_ASCII.sub(lambda match: _one(match[0]), text)


def _one(character: str) -> str:
    sign = SIGNS.get(character, "")
    if len(sign) == 1:
        return sign
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    folded = unicodedata.normalize("NFKC", character)
    return folded if len(folded) == 1 and folded.isascii() else character


def _plain(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    folded = unicodedata.normalize("NFKC", character)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        top, _, bottom = folded.partition("⁄")
        return f"\\frac{{{top}}}{{{bottom or '1'}}}"
    return folded
