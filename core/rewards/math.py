"""Rewards for mathematical answers: the last \\boxed{...}, or the last number, against the label.

Owns finding the answer in a response and in a label, and the order of comparisons: text, numbers, expressions. Each costs
more than the one before and decides what that leaves open.
"""

from __future__ import annotations

import re

from millrace.core.hooks import RewardInput, RewardResult
from millrace.core.rewards.answer_text import LONGEST, Quantity, key, number, quantity, spelling
from millrace.core.rewards.symbolic import same_expression
from millrace.core.rewards.text import label_text

BRACE = re.compile(r"\\(?:boxed|fbox) *\{|\\.|[{}]", re.DOTALL)
FINAL = "####"  # stands before the answer in GSM8K's labels
LAST = re.compile(
    r"-?\\[dtc]?frac *\{-?\d+\} *\{-?\d+\}"
    r"|(?<![\w.,/)])-?\d+/\d+(?![\d/]|\.\d)"
    r"|(?:(?<![\w)\]])[-+])?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?: *\\?%)?"
)


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} or \\fbox{...} of a text, braces within it balanced; None without a whole one.

    One pass: a response may hold thousands of boxes that never close.
    """
    opened: list[int | None] = []  # by open brace: where its box begins, None for other braces
    start, last = -1, None
    for brace in BRACE.finditer(text):
        if brace[0].endswith("{") and brace[0] != "\\{":
            opened.append(brace.end() if brace[0] != "{" else None)
        elif brace[0] == "}" and opened:
            box = opened.pop()
            if box is not None and box > start:
                start, last = box, text[box : brace.start()]
    return None if last is None else last.strip()


def answer_of(text: str, *, boxed_only: bool = False) -> str | None:
    """The answer a response gives: its last box, else (unless boxed_only) its last number or fraction of numbers."""
    boxed = last_boxed(text)
    if boxed is not None or boxed_only:
        return boxed
    numbers = [match[0] for match in LAST.finditer(text)]
    return numbers[-1].rstrip(".,") if numbers else None


def equal(answer: str, label: str, *, symbolic: bool = True) -> bool:
    """Whether two mathematical expressions are the same: as text, as rational numbers, or, if `symbolic`, by algebra.

    Symmetric. A unit counts only where both have one; a percent sign may be left out, and 50\\% is 50 and 0.5. Answers
    longer than LONGEST, or too large to compute, are compared as text alone.
    """
    if max(len(answer), len(label)) > LONGEST:
        return answer.strip() == label.strip() != ""
    a, b = spelling(answer), spelling(label)
    if key(a) == key(b):
        return bool(a)
    one, other = quantity(a), quantity(b)
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if _same(one.value, other.value, symbolic):
        return True
    if one.percent == other.percent:
        return False
    return _same(_hundredth(one), _hundredth(other), symbolic)


def math(
    sample: RewardInput, *, boxed_only: bool = False, symbolic: bool = True, after: str | None = None
) -> RewardResult:
    """1 if the response's answer equals the label, else 0. The answer is kept in its normal form.

    boxed_only: without a box the response has no answer. after: only the text after the last occurrence of this marker
    counts ("</think>"); a response without it has no answer. Of a label with a box or with ####, what these mark counts.
    Errors: ValueError for an empty label: the data are wrong, not the response.
    """
    label = label_text(sample.label)
    label = last_boxed(label) or label.rpartition(FINAL)[2]
    if not label.strip():
        raise ValueError("the label is empty")
    text = sample.response
    if after is not None:
        head, marker, text = text.rpartition(after)
        if not marker:
            return RewardResult(0.0, answer="")
    answer = answer_of(text, boxed_only=boxed_only)
    return judged(answer, label, symbolic=symbolic)


def judged(answer: str | None, label: str, *, symbolic: bool = True) -> RewardResult:
    """1 if an answer equals the label, else 0, with its normal form: that of the label if they are equal."""
    if not answer:
        return RewardResult(0.0, answer="")
    right = equal(answer, label, symbolic=symbolic)
    return RewardResult(float(right), answer=normal_form(label if right else answer))


def normal_form(answer: str) -> str:
    """One text for the spellings of an answer: numbers by value, others by their spelling."""
    text = spelling(answer)[:LONGEST]
    value = number(text)
    return key(text) if value is None else str(value)


def _same(a: str, b: str, symbolic: bool) -> bool:
    if key(a) == key(b):
        return bool(a)
    x, y = number(a), number(b)
    if x is not None and y is not None:
        return x == y
    return symbolic and bool(a and b) and same_expression(a, b)


def _hundredth(part: Quantity) -> str:
    if not part.percent:
        return part.value
    value = number(part.value)
    return f"\\frac{{{part.value}}}{{100}}" if value is None else str(value / 100)
