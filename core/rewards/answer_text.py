"""The text of a mathematical answer: its spelling, its unit, its number. Pure: strings in, strings and fractions out.

Owns what two spellings of one answer share without any algebra. `symbolic` compares what is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 400  # characters of an answer that is read at all

CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "\\div ", "π": "\\pi ", "∞": "\\infty ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "°": "^\\circ ", "\u00a0": " ", "∅": "\\emptyset ",
    }
)  # fmt: skip
SPELLINGS = [
    (re.compile(r"\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])"), ""),
    (re.compile(r"(?<!\\)\\!|\\?\$"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\s"), " "),
    (re.compile(r"\{ *, *\}"), ","),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(le|ge|ne)q(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"\\leqslant(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\geqslant(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|it|rm|normal)|mbox|bf|boldsymbol) *(?=\{)"), r"\\text"),
    (re.compile(r"\\text *\{ *\}"), ""),
    (re.compile(r"\^ *\{? *\\circ *\}?|\\degree(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"\\?%|\\text\{ *percent *\}| percent$"), r"\\%"),
    (re.compile(r" +"), " "),
]  # fmt: skip
WHOLE_TEXT = re.compile(r"\\text\{([^{}]*)\}")
THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d)")
APART = re.compile(r"(?<![_^\d.])\d[\d.]* (?=\d)")  # not \log_2 8

INTEGER = r"\d{1,3}(?:,\d{3})+|\d+"
DECIMAL = rf"(?:{INTEGER})(?:\.\d*)?|\.\d+"
NUMBER = re.compile(
    rf"([+-]?)(?:({DECIMAL})(?:[eE]([+-]?\d{{1,3}})|(?:\\times|\\cdot)10\^\{{?([+-]?\d{{1,3}})\}}?)?"
    rf"|(\d+ |\d+(?=\\frac))?(?:\\frac\{{([+-]?\d+)\}}\{{([+-]?\d+)\}}|\\frac(\d)(\d)|(\d+)/(\d+)))"
)

# How a unit may be written. Plain letters stand for a unit only where they are longer than a variable.
UNITS = {
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "s": "s sec second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "year": "year years",
    "mi/h": "mph",
    "km/h": "kmh kph kmph",
    "cent": "cent cents",
    "dollar": "dollar dollars",
    "degree": "degree degrees",
    "unit": "unit units",
}
NAMES = {name: unit for unit, names in UNITS.items() for name in names.split()}
PLAIN_UNITS = "|".join(sorted((name for name in NAMES if len(name) > 1), key=len, reverse=True))
POWER = r"(?:\^\{?(?P<power>\d)\}?)?"
WRITTEN_UNIT = re.compile(rf"(?P<value>.*\S) *\\text\{{(?P<unit>[^{{}}]*)\}} *{POWER}")
PLAIN_UNIT = re.compile(
    rf"(?P<value>.*[\d}}]) *(?P<unit>(?:(?:square|cubic|sq|cu) )?(?:{PLAIN_UNITS})) *{POWER}"
)
WORD = re.compile(r"(?P<value>.*\d) (?P<unit>[a-z]{4,})(?P<power>)")  # 12 apples
DEGREES = re.compile(r"(?P<value>.*\S) *\^\\circ *")
BASE = re.compile(r"(?P<value>\d+)_\{?(?P<base>\d+)\}?")
NOT_A_UNIT = {
    "or",
    "and",
    "to",
    "if",
    "than",
    "not",
    "no",
    "least",
    "most",
    "more",
    "less",
    "where",
    "for",
    "when",
}
POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}


@dataclass(frozen=True)
class Quantity:
    """An answer taken apart: the value as text, the unit if it names one, and whether a percent sign follows it."""

    value: str
    unit: str | None = None
    percent: bool = False


def spelling(text: str) -> str:
    """The text with one spelling of what LaTeX writes in many ways; words and symbols are one space apart.

    Spaces that group thousands go; between any other two digits the space stays, so that "1 2" is not 12.
    """
    text = text.translate(CHARACTERS)
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    text = THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text.strip())
    whole = WHOLE_TEXT.fullmatch(text)
    return (whole[1].strip() if whole else text).rstrip(". ").removeprefix("+").strip()


def key(text: str) -> str:
    """A spelling without the spaces that mean nothing: equal keys are equal answers."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def is_apart(text: str) -> bool:
    """Whether two numbers stand side by side with only a space between: no one number, and no known operation."""
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
        if int(bottom) == 0:
            return None
        value = int(whole or 0) + Fraction(int(top), int(bottom))
    return -value if sign == "-" else value


def quantity(text: str) -> Quantity:
    """A spelling's value, unit and percent sign. Trailing words are a unit only where they follow a value."""
    for pattern in (WRITTEN_UNIT, PLAIN_UNIT, WORD):
        match = pattern.fullmatch(text)
        unit = match and _unit(match["unit"], match["power"])
        if match and unit:
            turned = DEGREES.fullmatch(match["value"])  # 20^\circ \text{C}
            return Quantity(turned["value"], f"degree {unit}") if turned else Quantity(match["value"], unit)
    if turned := DEGREES.fullmatch(text):
        return Quantity(turned["value"], "degree")
    if based := BASE.fullmatch(text):
        return Quantity(based["value"], f"base {based['base']}")
    if text.endswith("\\%") and len(text) > 2:
        return Quantity(text.removesuffix("\\%").strip(), percent=True)
    return Quantity(text)


def _unit(text: str, power: str | None) -> str | None:
    """One name for a unit, however it is written; None for words that are no unit."""
    words = re.sub(r" *\bper\b *", "/", text.strip()).replace("^", " ").split()
    if not words or len(words) > 4 or NOT_A_UNIT & {word.lower() for word in words}:
        return None
    named = []
    for word in words:
        if word in POWERS:
            power = POWERS[word]
        elif len(words) > 1 and word in ("2", "3"):
            power = word
        else:
            named.append("/".join(NAMES.get(part, part) for part in word.split("/")))
    name = " ".join(named)
    return f"{name}^{power}" if power else name
