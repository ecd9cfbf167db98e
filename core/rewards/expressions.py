"""Expressions as math-verify reads and compares them. Imported late: it loads sympy and a parser.

Owns the library's input and how its verdicts are combined; `symbolic` owns the bounds.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify
from sympy.logic.boolalg import Boolean

from millrace.core.rewards.answer_text import number

# math-verify warns that it sets no time limit: `symbolic` sets one.
logging.getLogger("math_verify").setLevel(logging.ERROR)

AS_WRITTEN = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=LatexNormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="last"
    ),
)
EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
SEPARATOR = re.compile(r"[,;]|\b(?:or|and)\b")
NAME = re.compile(r"(?>\\(?!pi|infty)[a-zA-Z]+|[a-zA-Z]|_\{?\w+\}?|[-+(){} ,'])+")
MEMBER = re.compile(r"[a-zA-Z] *\\in(?![a-zA-Z]) *")
DECIMAL = re.compile(
    r"(?<![\d._])(?:(?:\d{1,3}(?:,\d{3})+|\d+)\.\d*|\.\d+|\d+(?=[eE][+-]?\d))(?:[eE][+-]?\d{1,3})?(?![\d.])"
)
# The parser reads 2(3) as a mixed number and adds.
TIMES = re.compile(r"(?<![_^\d.,])(\d[\d.,]*) *(?=\(|\\[td]?binom)|\) *(?=[(\d])")
# expressions are compared at one point: the k-th letter has the value k + this
POINT = sympy.Rational(7313, 10007)
SLOW = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit)


def same(a: str, b: str) -> bool:
    """Whether two spellings are the same expression, equation, set, interval or matrix. Can be slow."""
    name_a, value_a = _chain(a)
    name_b, value_b = _chain(b)
    if value_a is None or value_b is None:
        return False
    if (name_a is None) != (name_b is None):
        # an equation is no value
        if "=" in (name_a, name_b):
            return False
    elif name_a is not None and name_b is not None and name_a != name_b:
        value_a, value_b = f"{name_a}={value_a}".lstrip("="), f"{name_b}={value_b}".lstrip("=")
    first, second = number(value_a), number(value_b)
    if first is not None and second is not None:
        return first == second
    x, y = read(value_a), read(value_b)
    return x is not None and y is not None and _equal(x, y)


def form(text: str) -> str | None:
    """The library's text for an expression with its constants computed; None if it cannot read it."""
    found = read(text)
    if not isinstance(found, sympy.Basic):
        return None
    try:
        return str(found.doit())
    except Exception:  # noqa: BLE001 - see `_equal`
        return str(found)


# a label is compared with every answer of its group
@lru_cache(maxsize=256)
def read(text: str) -> Any:
    """math-verify's parse of an expression, with decimals as fractions; None if it cannot read it."""
    text = DECIMAL.sub(_as_fraction, TIMES.sub(lambda match: match[0] + "\\cdot ", text))
    found = parse(f"\\boxed{{{text}}}", [AS_WRITTEN], fallback_mode="no_fallback", parsing_timeout=None)
    return _with_constants(found[0]) if found else None


def _with_constants(found: Any) -> Any:
    """Replace the letter i by the imaginary unit, and compute sums and products of known length."""
    if not isinstance(found, sympy.Basic):
        return found
    letters = [letter for letter in found.free_symbols if letter.name == "i"]
    found = found.subs(dict.fromkeys(letters, sympy.I)) if letters else found
    return found.doit() if found.has(sympy.Sum, sympy.Product) else found


def _chain(text: str) -> tuple[str | None, str | None]:
    """The name and the value of `name = a = b`, in which a and b must be equal; the name "=" for an equation with unknowns.

    The value is None if there is none: a chain without a name whose sides differ.
    """
    text = text[match.end() :] if (match := MEMBER.match(text)) else text
    sides = [side.strip() for side in EQUALS.split(text)]
    # the sign is within braces, as in \sum_{k=1}
    if any(side.count("{") != side.count("}") for side in sides):
        return None, text
    if len(sides) == 1 or (len(sides) > 2 and SEPARATOR.search(text)):
        return None, text
    if not all(sides):
        return None, None
    name = sides[0].replace(" ", "") if NAME.fullmatch(sides[0]) else None
    values = sides if name is None else sides[1:]
    if all(same(*pair) for pair in pairwise(values)):
        return name, values[-1]
    unknown = [x.free_symbols for x in map(read, values) if isinstance(x, sympy.Basic)]
    return ("=", text) if name is None and any(unknown) else (None, None)


def _equal(x: Any, y: Any) -> bool:
    """The library's verdict. Text that is no mathematics can parse as an expression on which the library raises any error."""
    try:
        if _is_list(x) and _is_pair(y) or _is_pair(x) and _is_list(y):
            return False
        if _differ_at_a_point(x, y):
            return False
        return bool(verify(x, y, allow_set_relation_comp=True, timeout_seconds=None))
    except Exception:  # noqa: BLE001 - see above; what cannot be compared is not equal
        return False


def _is_list(x: Any) -> bool:
    return isinstance(x, sympy.FiniteSet)


def _is_pair(x: Any) -> bool:
    """Whether x is a pair, an open interval, or the inequalities of an interval."""
    return isinstance(x, sympy.Tuple | Boolean) or (
        isinstance(x, sympy.Interval) and bool(x.left_open and x.right_open)
    )


def _differ_at_a_point(x: Any, y: Any) -> bool:
    """Whether two expressions have different values at a point of their letters: quicker than algebra, and as certain."""
    for expression in (x, y):
        if not isinstance(expression, sympy.Expr) or isinstance(expression, sympy.MatrixExpr):
            return False
        # a symbol may stand for a product of letters
        if expression.is_Symbol or expression.has(*SLOW):
            return False
    letters = x.free_symbols | y.free_symbols
    names = sorted({letter.name for letter in letters})
    at = {letter: POINT + names.index(letter.name) for letter in letters}
    first, second = (expression.evalf(20, subs=at) for expression in (x, y))
    if not (first.is_number and second.is_number and first.is_finite and second.is_finite):
        return False
    size = max(abs(first), abs(second))
    return bool(abs(first - second) > size * sympy.Float("1e-9"))


def _as_fraction(match: re.Match[str]) -> str:
    value = Fraction(match[0].replace(",", ""))
    top, bottom = value.as_integer_ratio()
    return str(top) if bottom == 1 else f"\\frac{{{top}}}{{{bottom}}}"


def _fill_tables() -> None:
    """Fill the parser's tables, which fill on first use, outside of the time limit of an answer."""
    same("\\frac{1}{2}x^2+\\sqrt{3}-\\log_2 8", "x^2/2+3!")
    same("x\\le 2", "(-\\infty,2]")
    same("1<x<2", "(1,2)")
    same("\\{1,\\pi\\}\\cup\\{2\\}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}")


_fill_tables()
