"""The text of a mathematical answer: its spelling, its parts, their values and units. Pure: strings in, values out.

Owns what two spellings of one answer share without any algebra. `symbolic` compares the rest. An unknown word makes an answer a
text, which only equals the same text: no part that is not understood is dropped.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from millrace.core.rewards.text import plain
from millrace.core.rewards.units import WORD, WORTH, Unit, is_word, unit_of

LONGEST = 400  # longer answers are not read
MOST_ITEMS = 20  # most items of a list
NONE: frozenset[str] = frozenset()

SPELLINGS = [
    (re.compile(r"\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])"), ""),
    (re.compile(r"(?<!\\)\\!"), ""),
    (re.compile(r"(?<!\\)\$(?!\d)|(?<=\d)\$"), ""),
    (re.compile(r"(?<=\d)\{ *, *\}(?=\d)"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\s"), " "),
    (re.compile(r"\{ *, *\}"), ","),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\langle(?![a-zA-Z])"), "("),
    (re.compile(r"\\rangle(?![a-zA-Z])"), ")"),
    (re.compile(r"\\(le|ge|ne)q(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"\\leqslant(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\geqslant(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\(?:math(?:rm|bf|it|sf|normal)|text(?:bf|it|rm|sf|normal)|mbox|bf|boldsymbol) *(?=\{)"), r"\\text"),
    (re.compile(r"\\text *\{ *([ei]) *\}"), r"\1"),
    (re.compile(r"\\text *\{ *\}"), ""),
    (re.compile(r"\^ *\{? *\\circ *\}?|\\degree(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"\\?%|\\text\{ *percent *\}| percent$"), r"\\%"),
    (re.compile(r"\\dot *\{ *(\d) *\}|\\dot *(\d)"), r"\\overline{\1\2}"),
    (re.compile(r" {2,}"), " "),
]  # fmt: skip
TEXT = re.compile(r"\\text *\{([^{}]*)\}")
THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d)")
COMMAS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
APART = re.compile(r"(?<![_^\d.])\d[\d.]* (?=\d)")  # not \log_2 8
REPEATING = re.compile(r"(?<![\d.])(\d{0,30})\.(\d{0,30})\\(?:overline|bar) *\{(\d{1,30})\}")

INTEGER = r"\d{1,3}(?:,\d{3})+|\d+"
DECIMAL = rf"(?:{INTEGER})(?:\.\d*)?|\.\d+"
NUMBER = re.compile(
    rf"([+-]?)(?:({DECIMAL})(?:[eE]([+-]?\d{{1,3}})|(?:\\times|\\cdot|\*)10(?:\^|\*\*)\{{?([+-]?\d{{1,3}})\}}?)?"
    rf"|(\d+ |\d+(?=\\frac))?(?:\\frac\{{([+-]?\d+)\}}\{{([+-]?\d+)\}}|\\frac(\d)(\d)|(\d+)/(\d+)))"
)
COMMAND = re.compile(r"\\(?:begin|end|operatorname|mathbb|mathcal) *\{[a-zA-Z*]*\}|\\[a-zA-Z]+")

LEAD = re.compile(
    r"(?:(?:the|our|my|final|correct|right|answer|result|value|solution|option|choice|total|is|are|equals?|so|thus|hence|therefore|we|get|"
    r"have|exactly|approximately|of|to|be|it) *[:,]? +|\\(?:approx|therefore|implies|Rightarrow|sim)(?![a-zA-Z]) *|[=:] *)+",
    re.IGNORECASE,
)
REMARK = re.compile(
    r" *\((?:rounded[^()]*|exact|exactly|approx\.?|approximately|simplified|in simplest form|to the nearest [a-z ]+|nearest [a-z]+)\)$"
)
CHOICE = re.compile(r"\(([A-Ja-j])\)(?: +(.*))?|([A-J])[.:)](?: +(.*))?")
OTHER_CHOICE = re.compile(r"\([A-Ja-j]\)|(?<![A-Za-z])[A-J](?![A-Za-z])")
DOUBT = re.compile(
    r"\b(?:or|and|not|no|is|isn't|wrong|incorrect|false|cannot|but|maybe|perhaps|either|neither|nor|out|eliminated)\b",
    re.IGNORECASE,
)
NAMED = re.compile(r"([a-zA-Z](?:_\{?\w+\}?)?) *= *([^=<>]+)")
SEPARATOR = re.compile(r"[,;]|\b(?:or|and)\b")
OPENING, CLOSING = "([{", ")]}"

CURRENCY = re.compile(r"(-?) *(?:(\\\$|\$|US\$)|([€£¥₹])) *(?=[\d.])(.*)")
SYMBOLS = {"€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
UNIT_POWER = r"(?:\^\{?(?P<power>-?\d)\}?)?"
WRITTEN_UNIT = re.compile(rf"(?P<value>.*?[^\s\\]) *\\text\{{(?P<unit>[^{{}}]*)\}} *{UNIT_POWER}")
PLAIN_UNIT = re.compile(
    rf"(?P<value>.*?[\d}}!)\]a-z]) *(?P<unit>(?<![\\a-zA-Z])[a-zA-Z]{{2,}}(?:[ /]+[a-zA-Z]+(?:\^\{{?-?\d\}}?)?)*) *{UNIT_POWER}"
)
DEGREES = re.compile(r"(?P<value>.*\S) *\^\\circ *(?:\\text\{ *)?(?P<scale>[CFK])?(?: *\})?")
BASE = re.compile(r"(?P<value>[0-9A-Fa-f]+)_\{?(?P<base>\d{1,2})\}?")
ORDINAL = re.compile(r"(-?\d+) *(?:\\text\{ *)?(?:\^\{?)?(?:st|nd|rd|th)\}?(?: *\})?")
OPERATIONS = [
    (re.compile(r"(?<=[\d)}]) +plus +(?=[\d(\\-])"), "+"),
    (re.compile(r"(?<=[\d)}]) +minus +(?=[\d(\\])"), "-"),
    (re.compile(r"(?<=[\d)}]) +times +(?=[\d(\\-])"), "\\\\times "),
    (re.compile(r"(?<=[\d)}]) +(?:over|divided by) +(?=[\d(\\-])"), "/"),
    (re.compile(r"^(?:negative|minus) +(?=[\d.\\])"), "-"),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"(?<![\\a-zA-Z])(?:infinity|infty)(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"(?<![\\a-zA-Z])sqrt *\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=[\da-zA-Z)}]) squared$"), "^2"),
    (re.compile(r"(?<=[\da-zA-Z)}]) cubed$"), "^3"),
    (re.compile(r"(?<=[\da-zA-Z)}]) factorial$"), "!"),
]  # fmt: skip

MONTHS = {
    name: month
    for month in [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ]
    for name in (month.lower(), month[:3].lower())
} | {"sept": "September"}
CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))? ?(am|pm)")
DAY = re.compile(r"(?:(\d{1,2}) (?:of )?([a-z]+)|([a-z]+) (\d{1,2}))(?: (\d{4}))?")


@dataclass(frozen=True)
class Item:
    """One value of an answer: its text, its unit if it has one, and whether a percent sign follows. name: x in `x = value`."""

    value: str
    unit: Unit | None = None
    percent: bool = False
    name: str | None = None
    base: int | None = None  # base of a value that is digits in a base


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer. choice: the letter before it. words: it has words that are not understood."""

    text: str
    items: tuple[Item, ...]
    choice: str | None = None
    words: bool = False


def spelling(text: str) -> str:
    """The text in one of LaTeX's many spellings, with one space between words and symbols.

    Spaces that group thousands go; between any other two digits the space stays, so that "1 2" is not 12.
    """
    text = plain(text)
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    text = REPEATING.sub(_repeating, text)
    text = THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text.strip())
    return text.rstrip(". ").removeprefix("+").strip()


def key(text: str) -> str:
    """A spelling without meaningless spaces: equal keys are equal answers."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def words_key(text: str) -> str:
    """A text for comparison: lower case, without punctuation and articles; dates and times in one form."""
    text = TEXT.sub(r" \1 ", text).casefold()
    text = re.sub(r"\b([ap])\.? ?m\b\.?", r"\1m", text)
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text)
    text = " ".join(re.sub(r"[,.!\"']|\b(?:the|an|a)\b", " ", text).split())
    if clock := CLOCK.fullmatch(text):
        return f"{int(clock[1]) % 12 + 12 * (clock[3] == 'pm')}:{clock[2] or '00'}"
    if (day := DAY.fullmatch(text)) and (month := MONTHS.get(day[2] or day[3])):
        return f"{month} {int(day[1] or day[4])} {day[5] or ''}".strip()
    return text


def is_apart(text: str) -> bool:
    """Whether two numbers are separated by only a space: that is neither one number nor a known operation."""
    return APART.search(text) is not None and number(text) is None


def number(text: str) -> Fraction | None:
    """The rational number that a spelling writes: integer, decimal, 1e3, 1.5\\times10^{3}, fraction, or mixed number."""
    match = NUMBER.fullmatch(key(text))
    if match is None:
        return None
    sign, decimal, exponent, power, whole = match.groups()[:5]
    if decimal is not None:
        value = Fraction(decimal.replace(",", "")) * Fraction(10) ** int(exponent or power or 0)
    else:
        top, bottom = (part for part in match.groups()[5:] if part is not None)
        if int(bottom) == 0 or (whole and int(top) < 0):
            return None
        value = int(whole or 0) + Fraction(int(top), int(bottom))
    return -value if sign == "-" else value


# a label is compared with every answer of its group
@lru_cache(maxsize=512)
def read(answer: str, own: frozenset[str] = NONE) -> ParsedAnswer:
    """Parse an answer. own: words that count as units, besides the known ones."""
    text = spelling(answer)
    choice = None
    bare = _bare(text)
    if found := CHOICE.fullmatch(bare):
        letter, rest = found[1] or found[3], found[2] or found[4] or ""
        if not DOUBT.search(rest) and not OTHER_CHOICE.search(rest):
            choice, text = letter.upper(), rest
    while (remark := REMARK.search(_bare(text))) and remark.start():
        text = _bare(text)[: remark.start()]
    if (lead := LEAD.match(_bare(text))) and lead.end() < len(_bare(text)):
        text = text[lead.end() :] if text.startswith(lead[0]) else _bare(text)[lead.end() :]
    text = text.strip()
    parts = _split(text)
    items = [_item(part, own) for part in parts]
    words = any(_has_words(item.value) for item in items) or not all(item.value for item in items)
    # words that are not understood: compare the text as a whole
    if words and text:
        items = [Item(text)]
    elif len(items) == 1 and re.search(r"\\[pm][pm](?![a-zA-Z])", items[0].value):
        items = [replace(items[0], value=value) for value in _both_signs(items[0].value)]
    return ParsedAnswer(text, tuple(items), choice, words and bool(text))


def quantity(text: str, own: Collection[str] = ()) -> Item:
    """A spelling's value, unit and percent sign. Trailing words are a unit only if each word is known."""
    total, rest = Fraction(0), text
    # up to three units, as in 6 ft 3 in
    for _ in range(3):
        match = re.match(r"([\d.]+) *(?:\\text\{ *)?([a-zA-Z]+)(?: *\})?(?: +| *and +|, *)?(?=\d)", rest)
        unit = unit_of(match[2]) if match else None
        if not match or unit is None or number(match[1]) is None:
            break
        total, rest = total + (number(match[1]) or 0) * unit.factor, rest[match.end() :]
        last = _quantity(rest, own)
        value = number(last.value)
        if last.unit and last.unit.dimensions == unit.dimensions and value is not None:
            whole = total + value * last.unit.factor
            return Item(str(whole), Unit(unit.dimensions))
    return _quantity(text, own)


def _quantity(text: str, own: Collection[str]) -> Item:
    if based := BASE.fullmatch(text):
        return _in_base(based["value"], int(based["base"])) or Item(text)
    if turned := DEGREES.fullmatch(text):
        scale = {"C": " celsius", "F": " fahrenheit", "K": " kelvin", None: ""}[turned["scale"]]
        return Item(turned["value"], unit_of(f"degree{scale}"))
    if money := CURRENCY.fullmatch(text):
        inner = _quantity(money[4], own)
        unit = unit_of(SYMBOLS.get(money[3], "dollar"))
        if inner.unit in (None, unit):
            return replace(inner, value=f"{money[1]}{inner.value}", unit=unit)
        return Item(text)
    if text.endswith("\\%") and len(text) > 2:
        return Item(text.removesuffix("\\%").strip(), percent=True)
    if ordinal := ORDINAL.fullmatch(text):
        return Item(ordinal[1])
    for pattern in (WRITTEN_UNIT, PLAIN_UNIT):
        match = pattern.fullmatch(text)
        if match is None:
            continue
        words = match["unit"].replace("\\text", "").split()
        worth = Fraction(1)
        while words and words[0].lower() in WORTH:
            worth *= WORTH[words.pop(0).lower()]
        if words[:1] == ["of"] and worth != 1:
            words.pop(0)
        unit = unit_of(" ".join(words), match["power"], own) if words else None
        if (words and unit is None) or (worth == 1 and not words):
            continue
        value = match["value"]
        if worth != 1:
            plainly = number(value)
            if plainly is None:
                continue
            value = str(plainly * worth)
        inner = _quantity(value, own) if "text" in value or value.endswith("}") else Item(value)
        # 20^\circ \text{C} was read above
        if inner.unit or inner.percent:
            continue
        return Item(value, unit)
    return Item(text)


def _item(text: str, own: Collection[str]) -> Item:
    text, name = text.strip(), None
    if named := NAMED.fullmatch(text):
        name, text = named[1].replace(" ", ""), named[2].strip()
    found = quantity(text, own)
    value = _operations(found.value)
    if value != found.value and found.unit is None:
        found = quantity(value, own)
    value = _unwrapped(found.value)
    if value != found.value and found.unit is None and not found.percent:
        again = quantity(value, own)
        found = again if again.unit is None or not re.search(r"[\d}][a-zA-Z]$", value) else found
    return replace(found, value=_operations(_unwrapped(found.value)), name=name)


def _bare(text: str) -> str:
    """A spelling with text as plain words."""
    return " ".join(TEXT.sub(r" \1 ", TEXT.sub(r" \1 ", text)).split())


def _unwrapped(text: str) -> str:
    """Replace \\text by its letters and words; digits stay separated from digits."""
    text = TEXT.sub(
        lambda match: match[1] if re.fullmatch(r" *[a-zA-Z] *", match[1]) else f" {match[1].strip()} ", text
    )
    return " ".join(text.split())


def _operations(text: str) -> str:
    for pattern, replacement in OPERATIONS:
        text = pattern.sub(replacement, text)
    return text


def _has_words(value: str) -> bool:
    if TEXT.search(value) or re.search(r"\d['\"]|\?", value):
        return True
    return any(is_word(word) for word in WORD.findall(COMMAND.sub(" ", value)))


def _split(text: str) -> list[str]:
    """The parts of a list at its top level; one part if the text is no list."""
    grouped = (
        COMMAS.sub(lambda match: match[0].replace(",", ""), text) if not re.search(r"[(\[{]", text) else text
    )
    if "\\begin" in grouped or "|" in grouped and "\\{" in grouped:
        return [grouped]
    plainly = TEXT.sub(
        lambda match: f" {match[1]} " if re.fullmatch(r" *(?:or|and|,|;) *", match[1]) else match[0], grouped
    )
    parts, depth, start, at = [], 0, 0, 0
    while at < len(plainly):
        character = plainly[at]
        if character == "\\" and plainly[at + 1 : at + 2] not in ("{", "}"):
            at += 2
            continue
        depth += (character in OPENING) - (character in CLOSING)
        if (
            depth == 0
            and (found := SEPARATOR.match(plainly, at))
            and not (at and plainly[at - 1].isalpha() and character.isalpha())
        ):
            parts.append(plainly[start:at])
            start = at = found.end()
            continue
        at += 1
    parts = [part.strip() for part in [*parts, plainly[start:]]]
    merged = [part for part in parts if part]
    if len(merged) < len(parts) - 1 or not merged or len(merged) > MOST_ITEMS:
        return [grouped]
    return merged


def _both_signs(text: str) -> list[str]:
    pairs = (("+", "-"), ("-", "+"))
    return [
        re.sub(r"\\pm(?![a-zA-Z]) *", upper, re.sub(r"\\mp(?![a-zA-Z]) *", lower, text)).removeprefix("+")
        for upper, lower in pairs
    ]


def _in_base(digits: str, base: int) -> Item | None:
    return Item(digits, base=base) if in_base(digits, base) is not None else None


def in_base(digits: str, base: int) -> int | None:
    """The value of digits in a base; None if they are no digits of it."""
    if not 2 <= base <= 16 or not digits.isalnum():
        return None
    try:
        return int(digits, base)
    except ValueError:
        return None


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    top = int((whole or "0") + fixed + repeated) - int((whole or "0") + fixed)
    bottom = int("9" * len(repeated) + "0" * len(fixed))
    value = Fraction(top, bottom)
    return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
