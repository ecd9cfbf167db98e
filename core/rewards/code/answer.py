"""The program in a response, and whether its result is what the row expects. Pure: text in, verdict out."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from typing import Any

LONGEST_NUMBER = 400  # characters of a number that is compared by value
FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)")


def last_code_block(text: str) -> str | None:
    """The code of the last fenced block that is closed; None without one. Linear in the text's length.

    Fences are CommonMark's: three or more backticks or tildes, closed by at least as many of the same. A block that is indented
    with its fence, as in a list, loses that indentation.
    """
    found: str | None = None
    block: list[str] | None = None
    indent, fence = 0, ""
    for line in text.replace("\r\n", "\n").split("\n"):
        match = FENCE.fullmatch(line)
        if block is None:
            if match and not (match[2][0] == "`" and "`" in match[3]):
                block, indent, fence = [], len(match[1].expandtabs(4)), match[2]
        elif match and match[2].startswith(fence) and not match[3].strip():
            found, block = "\n".join(block), None
        else:
            block.append(_dedented(line, indent))
    return found


def _dedented(line: str, indent: int) -> str:
    """The line without as much of its indentation as the fence has."""
    if not indent:
        return line
    spaces = len(line) - len(line.lstrip(" \t"))
    plain = line[:spaces].expandtabs(4)
    return plain[indent:] + line[spaces:]


@contextmanager
def long_integers() -> Iterator[None]:
    """Within the block, integers of any length are read and written as text: programs and tests may use over 4,300 digits."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def same_output(printed: str, expected: str) -> bool:
    """Whether two texts are equal except for space at line ends, blank lines at the end, and the spelling of numbers.

    Numbers are equal as decimals: 1.50 is 1.5, and 0.333 is not 1/3. As LiveCodeBench compares (Jain et al., arXiv:2403.07974).
    """
    left, right = _lines(printed), _lines(expected)
    if len(left) != len(right):
        return False
    return all(a == b or _same_numbers(a, b) for a, b in zip(left, right, strict=True))


def same_value(given: Any, expected: Any) -> bool:
    """Whether a function returned the expected JSON value; a tuple counts as a list."""
    return bool(_plain(given) == _plain(expected))


def decoded(value: Any) -> Any:
    """Turn a result of the answer's process, which marks each container, into a JSON value. Tuples become lists.

    Errors: ValueError for a value without a form in JSON.
    """
    try:
        return _value(value)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _value(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    match given:
        case ["l" | "t", *items]:
            return [_value(item) for item in items]
        case ["d", *pairs] if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return {str(_value(key)): _value(value) for key, value in pairs}
        case _:
            raise ValueError(f"no value of JSON: {str(given)[:100]}")


def _plain(value: Any) -> Any:
    """The value with lists for tuples, text for keys, and a mark on booleans, which would equal 0 and 1."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_numbers(left: str, right: str) -> bool:
    a, b = left.split(), right.split()
    try:
        return len(a) == len(b) and all(x == y or _number(x) == _number(y) for x, y in zip(a, b, strict=True))
    except InvalidOperation:
        return False


def _number(text: str) -> Decimal:
    if len(text) > LONGEST_NUMBER or "_" in text:
        raise InvalidOperation
    number = Decimal(text)
    if not number.is_finite():
        raise InvalidOperation
    return number
