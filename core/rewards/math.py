"""Rewards for mathematical answers: the last \\boxed{...}, or the last number, against the label.

Owns finding the answer and comparing it; math-verify decides what neither text nor numbers decide (fractions against roots,
sets, intervals). Symbolic comparison can run long: the scoring worker is killable.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from millrace.core.hooks import RewardInput
from millrace.core.rewards.number import find_last

MARKER = "\\boxed"
FRACTION = re.compile(r"^\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}$|^(-?\d+)/(\d+)$")
DROPPED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\\$|\$|\\%|%|\\text\{\s*\}|\s")
LONGEST = 400  # characters of an answer that is compared symbolically


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} of a text, braces within it balanced; None without a whole one."""
    at = text.rfind(MARKER)
    while at >= 0:
        opening = at + len(MARKER)
        while opening < len(text) and text[opening] == " ":
            opening += 1
        if opening < len(text) and text[opening] == "{":
            depth = 0
            for end in range(opening, len(text)):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                if depth == 0:
                    return text[opening + 1 : end].strip()
        at = text.rfind(MARKER, 0, at)
    return None


def answer_of(text: str, *, boxed_only: bool = False) -> str | None:
    """The answer a response gives: its last box, else (unless boxed_only) its last number as text."""
    boxed = last_boxed(text)
    if boxed is not None or boxed_only:
        return boxed
    number = find_last(text)
    return None if number is None else str(number)


def equal(answer: str, label: str, *, symbolic: bool = True) -> bool:
    """Whether two mathematical expressions are the same: as text without spacing, as rational numbers, or, if
    `symbolic`, as expressions."""
    a, b = _plain(answer), _plain(label)
    if a == b:
        return bool(a)
    x, y = _rational(a), _rational(b)
    if x is not None and y is not None:
        return x == y
    if not symbolic or max(len(a), len(b)) > LONGEST:
        return False
    return _verified(answer, label)


def math(
    sample: RewardInput, *, boxed_only: bool = False, symbolic: bool = True, after: str | None = None
) -> float:
    """1 if the response's answer equals the label, else 0.

    boxed_only: without a box the response has no answer. after: only the text after the last occurrence of this marker
    counts ("</think>"); a response without it has no answer. A boxed label is unpacked.
    Errors: ValueError for an empty label: the data are wrong, not the response.
    """
    label = "" if sample.label is None else str(sample.label)
    label = last_boxed(label) or label
    if not label.strip():
        raise ValueError("the label is empty")
    text = sample.response
    if after is not None:
        head, marker, text = text.rpartition(after)
        if not marker:
            return 0.0
    answer = answer_of(text, boxed_only=boxed_only)
    return float(answer is not None and equal(answer, label, symbolic=symbolic))


def _plain(text: str) -> str:
    plain = DROPPED.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return plain.rstrip(".").removeprefix("+")


def _rational(text: str) -> Fraction | None:
    match = FRACTION.match(text)
    if match:
        top, bottom = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
        return None if int(bottom) == 0 else Fraction(int(top), int(bottom))
    if (
        re.fullmatch(r"-?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?", text)
        and any(c.isdigit() for c in text)
        and len(text) < 64
    ):
        return Fraction(text.replace(",", ""))
    return None


def _verified(answer: str, label: str) -> bool:
    from math_verify import parse, verify

    def parsed(text: str) -> list[Any]:
        return list(parse(f"\\boxed{{{text}}}", parsing_timeout=None))

    gold, found = parsed(label), parsed(answer)
    return bool(gold and found and verify(gold, found, timeout_seconds=None))
