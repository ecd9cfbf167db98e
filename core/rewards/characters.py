"""Characters that are written in many ways, as ASCII and LaTeX: signs, digits of other widths and scripts, fractions, powers. Pure."""

from __future__ import annotations

import re
import unicodedata

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
