"""Rewards for mathematical answers: the last \\boxed{...}, or the last number, against the label.

Owns finding the answer in a response and in a label, and the order of comparisons: text, numbers, expressions. Each costs more
than the previous one and decides the cases that it leaves open.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from millrace.core.contracts.images import text_alone
from millrace.core.hooks.protocols import Prompt, RewardInput, RewardResult
from millrace.core.rewards.answer_text import (
    LONGEST,
    NONE,
    Item,
    ParsedAnswer,
    in_base,
    key,
    number,
    read,
    words_key,
)
from millrace.core.rewards.symbolic import same_expression, simplest
from millrace.core.rewards.text import label_text, plain
from millrace.core.rewards.units import NEVER_COUNTED, WORTH

BRACE = re.compile(r"\\(?:boxed|fbox) *\{|\\.|[{}]", re.DOTALL)
MOST_NUMBERS = 20  # numbers of a text that are tried, since each may be ruled out
FINAL = "####"  # precedes the answer in GSM8K's labels
NUMBER = (
    r"-?(?:(?<![\w.,])\d+ ?)?\\[dtc]?frac *\{-?\d+\} *\{-?\d+\}"
    r"|(?:(?<![\w)\]])[-+])?(?:(?<![\w.,/)])\d+ )?(?<![\w.,/)])\d+/\d+(?![\d/]|\.\d)"
    r"|(?:(?<![\w)\]])[-+])?(?:\d{1,3}(?:,\d{3}){1,20}(?!\d|,\d)(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?: *\\?%)?"
)
LAST = re.compile(NUMBER)
REACH = 60  # characters before and after a number that tell what it is
RULED_OUT = re.compile(
    r"(?:\b(?:not|never|than|unlike|instead of|except)|n't|\\ne|\\neq|!=|≠)(?: +(?:is|be|equal|equals|to|the|a|just|only))* *\$?$"
)
BEFORE = re.compile(
    rf"(?:\b(?:between|either|neither|from) +)?(?:{NUMBER}) *(?:\b(?:or|and|to|nor|versus|vs\.?|maybe|perhaps)|~) *$|\b(?:between|either|neither|maybe|perhaps|probably|at least|at most|up to|nearly|almost) +\$?$"
)
AFTER = re.compile(
    r"(?:[a-zA-Z]+|\\(?:text|mathrm)\{[^{}]*\}|!(?![!\s]|$)|(?: +(?:squared|cubed|factorial|"
    + "|".join(WORTH)
    + r")\b)+"
    r"(?: +[a-z]+)?| *(?:\\?%|percent\b)| +(?:or|maybe|perhaps|versus|to) +\$?(?:" + NUMBER + r"))?"
)
PART_OF = re.compile(r"[_^*]\{?$|\\(?:sqrt|frac|pi|sin|cos|log)[{}\d]*\{?$")
COUNTABLE = re.compile(r"[a-zA-Z]{3,}")
LONGEST_TAIL = 20_000  # last characters that are read of a response without a box
NEXT_BOX = re.compile(r"[\s$,;]*(?:\bor\b|\band\b)?[\s$,;]*")
LONGEST_PROMPT = 20_000  # characters that are read
TOKEN_START = re.compile(r"[^\s$]*$")
TOKEN_END = re.compile(r"[^\s$]*")


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} or \\fbox{...} of a text, braces within it balanced; None without a whole one."""
    boxes = _boxes(text)
    return text[boxes[-1][1] : boxes[-1][2]].strip() if boxes else None


def boxed_answer(text: str) -> str | None:
    """The last box; a list, if only "or", "and" or commas separate several boxes; empty if the text rules it out."""
    boxes = _boxes(text)
    if not boxes:
        return None
    first = len(boxes) - 1
    while first and NEXT_BOX.fullmatch(text[boxes[first - 1][2] + 1 : boxes[first][0]][: REACH + 1]):
        first -= 1
    if RULED_OUT.search(text[max(0, boxes[first][0] - REACH) : boxes[first][0]]):
        return ""
    return ", ".join(text[start:end].strip() for _, start, end in boxes[first:])


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """The start of each whole box, and the start and end of its content, by end; only the inner one of nested boxes.

    One pass: a response may hold thousands of boxes that never close.
    """
    opened: list[tuple[int, int] | None] = []  # by open brace: the start of its box, None for other braces
    found: list[tuple[int, int, int]] = []
    for brace in BRACE.finditer(text):
        if brace[0].endswith("{") and brace[0] != "\\{":
            opened.append((brace.start(), brace.end()) if brace[0] != "{" else None)
        elif brace[0] == "}" and opened:
            box = opened.pop()
            if box is not None and (not found or box[0] > found[-1][0]):
                found.append((*box, brace.start()))
    return found


def answer_of(text: str, *, boxed_only: bool = False) -> str | None:
    """The answer a response gives: its last box, else (unless boxed_only) its last number or fraction of numbers.

    The number keeps what changes it: a word or letters after it, another number after "or", the base that it is an exponent
    of. A number that is said not to be the answer is no answer. A box without an answer is no answer.
    """
    boxed = boxed_answer(text)
    if boxed is not None or boxed_only:
        return boxed
    text = plain(text[-LONGEST_TAIL:])
    for match in reversed([*LAST.finditer(text)][-MOST_NUMBERS:]):
        before, after = (
            text[max(0, match.start() - REACH) : match.start()],
            text[match.end() : match.end() + REACH],
        )
        if RULED_OUT.search(before):
            continue
        if PART_OF.search(before) or after.startswith(("^", "_")):
            start, end = TOKEN_START.search(before), TOKEN_END.match(after)
            assert start
            assert end
            return (start[0] + match[0] + end[0]).strip(".,;:!?*")
        joined, more = BEFORE.search(before), AFTER.match(after)
        return ((joined[0] if joined else "") + match[0].rstrip(".,") + (more[0] if more else "")).strip()
    return None


def equal(answer: str, label: str, *, symbolic: bool = True, own: frozenset[str] = NONE) -> bool:
    """Whether two mathematical answers are the same: as text, as values with units, or, if `symbolic`, by algebra.

    Symmetric. A unit counts only if both have one; a percent sign may be left out, and 50\\% is 50 and 0.5. Answers
    longer than LONGEST, or too large to compute, are compared as text alone. own: words that count as units, besides known
    ones.
    """
    if max(len(answer), len(label)) > LONGEST:
        return answer.strip() == label.strip() != ""
    a, b = read(answer, own), read(label, own)
    if a.choice or b.choice:
        return _same_choices(a, b, symbolic)
    return _same_readings(a, b, symbolic)


def _same_choices(a: ParsedAnswer, b: ParsedAnswer, symbolic: bool) -> bool:
    """Compare "(C) 12", "C" and "12": the letters decide if both have one, together with the values if both have them."""
    if a.choice and b.choice:
        values = not (a.text and b.text) or _same_readings(a, b, symbolic)
        return a.choice == b.choice and values
    lettered, other = (a, b) if a.choice else (b, a)
    if other.text.strip("()").upper() == lettered.choice:
        return True
    return bool(lettered.text) and _same_readings(lettered, other, symbolic)


def _same_readings(a: ParsedAnswer, b: ParsedAnswer, symbolic: bool) -> bool:
    if key(a.text) == key(b.text):
        return bool(a.text)
    if a.words or b.words:
        return words_key(a.text) == words_key(b.text) != ""
    if len(a.items) == len(b.items) == 1:
        return _same_items(a.items[0], b.items[0], symbolic)
    pairs = [_as_pair(one, other) for one, other in ((a, b), (b, a))]
    if any(pair is not None for pair in pairs):
        return bool(pairs[0] if pairs[0] is not None else pairs[1])
    if min(len(a.items), len(b.items)) > 1 and _match(a.items, b.items) and _match(b.items, a.items):
        return True
    if any(item.unit or item.percent for item in (*a.items, *b.items)):
        return False
    return symbolic and same_expression(_whole(a), _whole(b))


def _match(some: Sequence[Item], others: Sequence[Item]) -> bool:
    """Whether each has an equal among the others, without algebra."""
    return all(any(_same_items(one, other, False) for other in others) for one in some)


def _as_pair(named: ParsedAnswer, other: ParsedAnswer) -> bool | None:
    """Whether "x=2, y=3" and "(2,3)" are the same; None for other forms."""
    names = [item.name for item in named.items]
    if len(names) < 2 or None in names or len(set(names)) < len(names):
        return None
    text = other.text
    by_name = sorted(named.items, key=lambda item: item.name or "")
    if [item.name for item in other.items].count(None) == 0:
        others = sorted(other.items, key=lambda item: item.name or "")
        return [item.name for item in others] == sorted(map(str, names)) and all(
            _same_items(*pair, True) for pair in zip(by_name, others, strict=True)
        )
    if not (text.startswith("(") and text.endswith(")")):
        return None
    values = read(text[1:-1]).items
    return len(values) == len(by_name) and all(
        _same_items(replace(one, name=None), value, True) for one, value in zip(by_name, values, strict=True)
    )


def _whole(reading: ParsedAnswer) -> str:
    """The text that the library is given."""
    if len(reading.items) == 1:
        return _text_of(reading.items[0])
    return ",".join(item.value for item in reading.items)


def _text_of(item: Item) -> str:
    return item.value if item.name is None else f"{item.name}={item.value}"


def _same_items(a: Item, b: Item, symbolic: bool) -> bool:
    if a.base or b.base:
        return _same_in_bases(a, b)
    if a.unit and b.unit and a.unit.dimensions != b.unit.dimensions:
        return False
    if a.unit and b.unit and a.unit.factor != b.unit.factor:
        x, y = number(a.value), number(b.value)
        return x is not None and y is not None and x * a.unit.factor == y * b.unit.factor
    one, other = _text_of(a), _text_of(b)
    if a.name is None or b.name is None:
        one, other = (
            (a.value, b.value) if number(a.value) is not None or number(b.value) is not None else (one, other)
        )
    if _same(one, other, symbolic):
        return True
    if a.percent == b.percent:
        return False
    return _same(_hundredth(a), _hundredth(b), symbolic)


def _same_in_bases(a: Item, b: Item) -> bool:
    """Compare digits in a base with the same digits or their value; a number without a base may be such digits."""
    if a.base and b.base:
        return a.base == b.base and in_base(a.value, a.base) == in_base(b.value, b.base)
    based, bare = (a, b) if a.base else (b, a)
    assert based.base is not None
    value = number(bare.value)
    digits = in_base(bare.value, based.base)
    return in_base(based.value, based.base) == (value if digits is None else digits)


def math(
    sample: RewardInput, *, boxed_only: bool = False, symbolic: bool = True, after: str | None = None
) -> RewardResult:
    """1 if the response's answer equals the label, else 0. The answer is kept in its normal form.

    boxed_only: without a box the response has no answer. after: only the text after the last occurrence of this marker
    counts ("</think>"); a response without it has no answer. In a label with a box or with ####, the marked text counts.
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
    return judged(answer, label, symbolic=symbolic, own=words_of(sample.prompt))


def words_of(prompt: Prompt) -> frozenset[str]:
    """The words of a prompt that may be units of its answer: none that mean a number or a doubt."""
    texts = (
        [prompt] if isinstance(prompt, str) else [text_alone(message.get("content")) for message in prompt]
    )
    found = {word.lower() for text in texts for word in COUNTABLE.findall(text[:LONGEST_PROMPT])}
    return frozenset(found - NEVER_COUNTED)


def judged(
    answer: str | None, label: str, *, symbolic: bool = True, own: frozenset[str] = NONE
) -> RewardResult:
    """1 if an answer equals the label, else 0, with its normal form: the label's if they are equal."""
    if not answer:
        return RewardResult(0.0, answer="")
    right = equal(answer, label, symbolic=symbolic, own=own)
    return RewardResult(float(right), answer=normal_form(label if right else answer, symbolic=symbolic))


# samples of a group give the same answers
@lru_cache(maxsize=512)
def normal_form(answer: str, *, symbolic: bool = True) -> str:
    """One text for the spellings of an answer: numbers by value, lists sorted, words in lower case, expressions by sympy."""
    reading = read(answer[:LONGEST])
    if reading.choice and not reading.text:
        return reading.choice
    if reading.words:
        return words_key(reading.text)
    return ", ".join(sorted({_form(item, symbolic) for item in reading.items}))


def _form(item: Item, symbolic: bool) -> str:
    value = number(item.value) if item.base is None else Fraction(in_base(item.value, item.base) or 0)
    if value is None:
        return (simplest(item.value) if symbolic else None) or key(item.value)
    return str(value / 100 if item.percent else value)


def _same(a: str, b: str, symbolic: bool) -> bool:
    if key(a) == key(b):
        return bool(a)
    x, y = number(a), number(b)
    if x is not None and y is not None:
        return x == y
    return symbolic and bool(a and b) and same_expression(a, b)


def _hundredth(part: Item) -> str:
    if not part.percent:
        return part.value
    value = number(part.value)
    return f"\\frac{{{part.value}}}{{100}}" if value is None else str(value / 100)
