"""How large the numbers in an answer can grow, estimated by logarithms before anything is computed. Pure.

Owns the refusal: an answer of a few characters can ask for a number that fills the memory. The estimate reads LaTeX roughly
and errs upwards: sums count as products, a letter counts as 2, signs count for nothing.
"""

import math
import re

DIGITS = 10_000.0  # digits of the largest computed number
TERMS = 1000.0  # terms of the largest computed sum or product
DEPTH = 20  # nesting of braces, brackets, roots and towers
TOKENS = 250

TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+|\*\*|\S", re.ASCII)
NUMERAL = re.compile(r"\.?\d", re.ASCII)
OPENING = {"{": "}", "(": ")", "[": "]", "\\{": "\\}", "\\begin": "\\end"}
CLOSING = {*OPENING.values(), ")", "]"}
SIGNS = {"+", "-", "\\pm", "\\mp"}
NEUTRAL = {*SIGNS, "=", ",", ";", "&"}
REPEATED = {"\\sum", "\\prod", "\\bigcup", "\\bigcap"}
GROWING = {"\\Gamma", "\\gamma", "\\exp", "\\sinh", "\\cosh"}
# Functions that the parser computes on matrices while it reads; no answer needs them.
COMPUTED = re.compile(
    r"\\operatorname *\{ *(?:eye|zeros|ones|diag|hstack|vstack|rref|nullspace|norm|cols|rows|eig\w*|diagonalize|svd|SVD|orth\w*)"
)
TWO = math.log10(2)


class TooLarge(Exception):
    """An answer exceeds a bound of computation; the message names it."""


def check_size(text: str) -> None:
    """Raise TooLarge if a number, a sum, the nesting or the length of an expression exceeds its bound."""
    if COMPUTED.search(text):
        raise TooLarge("a computation on matrices")
    tokens = TOKEN.findall(re.sub(r"(?<=\d),(?=\d)|\{,\}", "", text))
    if len(tokens) > TOKENS:
        raise TooLarge(f"{len(tokens)} symbols")
    _Estimate(tokens).sequence(0)


class _Estimate:
    """One pass over the tokens. Every method returns an upper bound of log10 of the size of what it read."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0

    def sequence(self, depth: int, end: str | None = None) -> float:
        """Everything up to `end`, or to the end of the text."""
        if depth > DEPTH:
            raise TooLarge(f"more than {DEPTH} levels")
        total, last, times = 0.0, 0.0, 1.0
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            # an interval may close with another bracket than it opened
            if token == end or (end is not None and token in CLOSING):
                self.at += 1
                break
            if token in ("^", "**"):
                self.at += 1
                last = _power(last, self.exponent(depth))
            elif token == "!":
                self.at += 1
                last = _factorial(last)
            elif token == "_":
                self.at += 1
                self.argument(depth)
            elif token in REPEATED:
                times *= self.repeats(depth)
            else:
                total, last = total + last, self.item(depth)
            if (total + last) * times > DIGITS:
                raise TooLarge(f"a number of more than {DIGITS:g} digits")
        return (total + last) * times

    def item(self, depth: int) -> float:
        """One number, letter, group, or command with its groups."""
        if self.at >= len(self.tokens):
            return 0.0
        token = self.tokens[self.at]
        self.at += 1
        if token == "\\frac":
            return self.argument(depth) + self.argument(depth)
        if token in ("\\binom", "\\tbinom", "\\dbinom"):
            top, bottom = self.argument(depth), self.argument(depth)
            return min(_value(top) * TWO, _value(bottom) * max(top, TWO))
        if token in GROWING:
            return _factorial(self.argument(depth))
        if token in OPENING:
            return self.sequence(depth + 1, OPENING[token])
        if NUMERAL.match(token):
            return _of_number(token)
        return 0.0 if token in NEUTRAL else TWO

    def argument(self, depth: int) -> float:
        """The next item, unless the enclosing group ends first."""
        if self.at < len(self.tokens) and self.tokens[self.at] in CLOSING:
            return 0.0
        return self.item(depth + 1)

    def exponent(self, depth: int) -> float:
        """The exponent after a caret, with the towers above it."""
        if depth > DEPTH:
            raise TooLarge(f"more than {DEPTH} levels")
        while self.at < len(self.tokens) and self.tokens[self.at] in SIGNS:
            self.at += 1
        size = self.argument(depth)
        while self.at < len(self.tokens) and self.tokens[self.at] in ("^", "**", "!"):
            raised = self.tokens[self.at] != "!"
            self.at += 1
            size = _power(size, self.exponent(depth + 1)) if raised else _factorial(size)
        return size

    def repeats(self, depth: int) -> float:
        """Upper bound on the terms of the sum or product at this place."""
        self.at += 1
        terms = 1.0
        while self.at < len(self.tokens) and self.tokens[self.at] in ("_", "^"):
            self.at += 1
            terms = max(terms, _value(self.argument(depth)))
        if terms > TERMS:
            raise TooLarge(f"a sum or product of {terms:g} terms")
        return terms


def _value(size: float) -> float:
    return _refuse() if size > 300 else float(10**size)


def _refuse() -> float:
    raise TooLarge(f"a number of more than {DIGITS:g} digits")


def _power(base: float, exponent: float) -> float:
    return max(base, TWO) * _value(exponent)


def _factorial(size: float) -> float:
    value = _value(size)
    return value * max(size, TWO)


def _of_number(token: str) -> float:
    mantissa, _, exponent = token.lower().partition("e")
    digits = abs(int(exponent)) if len(exponent) < 8 and exponent else (math.inf if exponent else 0)
    if digits > DIGITS:
        _refuse()
    places = len(mantissa.replace(".", "").lstrip("0"))
    value = float(mantissa) if places < 300 else math.inf
    return max(math.log10(value) if 0 < value < math.inf else float(places), TWO) + digits
