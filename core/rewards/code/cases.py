"""The tests that a row of data holds, in the forms of the common data sets.

    tests          [{"input": ..., "output": ...}]              LiveCodeBench's public_test_cases; with `fn_name` calls
    input_output   {"inputs": [...], "outputs": [...], "fn_name": ...}      APPS, TACO
    test_list      ["assert f(1) == 2", ...]                    MBPP, with test_setup_code or test_imports
    test           "def check(candidate): ..." and entry_point  HumanEval

A value may be JSON text of the same. Owns only the parsing: nothing is run here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import DataError

FORMS = ("tests", "input_output", "test_list", "test")
REMEDY = "correct the row, or leave it out; docs/rewards.md#programs-that-tests-judge has the forms"


@dataclass(frozen=True)
class Case:
    """A program reads `given` from standard input and prints `expected`."""

    given: str
    expected: str


@dataclass(frozen=True)
class Call:
    """The function `name` with these arguments returns one of `expected`."""

    name: str
    arguments: list[Any]
    expected: list[Any]


@dataclass(frozen=True)
class Asserts:
    """Python sources that raise if the functions `names` are wrong. Empty `names`: all that they call and do not define."""

    sources: list[str]
    names: list[str]


Tests = Sequence[Case] | Sequence[Call] | Asserts


def tests_of(metadata: Mapping[str, Any]) -> Tests:
    """The tests in a row's metadata.

    Errors: DataError naming the key if there are none, or if they have another form.
    """
    key = next((key for key in FORMS if metadata.get(key)), None)
    if key is None:
        raise DataError(
            f"it has none of {', '.join(FORMS)}, only {sorted(metadata)}",
            where="tests of the row",
            remedy="name the column in data.sources[].extra_keys or metadata_key",
        )
    if key in ("tests", "input_output"):
        value = _parsed(metadata[key], key)
        pairs = _pairs_of_tests(value) if key == "tests" else _pairs_of_lists(value)
        name = metadata.get("fn_name") or (value.get("fn_name") if isinstance(value, Mapping) else None)
        if not name:
            return [_case(*pair) for pair in pairs]
        wrapped = all(len(result) == 1 for _, result in pairs if isinstance(result, list))
        return [_call(name, *pair, wrapped) for pair in pairs]
    entry = metadata.get("entry_point")
    if key == "test":
        if not isinstance(metadata["test"], str) or not isinstance(entry, str):
            raise _wrong(key, "test and entry_point are text")
        check = f"\ncheck({entry})\n" if "def check(" in metadata["test"] else "\n"
        return Asserts([metadata["test"] + check], [entry])
    listed = _parsed(metadata[key], key)
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise _wrong(key, "it is no list of text")
    imports = _parsed(metadata.get("test_imports") or [], "test_imports")
    setup = "\n".join([*imports, metadata.get("test_setup_code") or ""])
    return Asserts([f"{setup}\n{item}" for item in listed], [entry] if entry else [])


def _pairs_of_tests(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, list) or not all(
        isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in value
    ):
        raise _wrong("tests", "it is no list of mappings with input and output")
    return [(item["input"], item["output"]) for item in value]


def _pairs_of_lists(value: Any) -> list[tuple[Any, Any]]:
    inputs, outputs = (
        (value.get("inputs"), value.get("outputs")) if isinstance(value, Mapping) else (None, None)
    )
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        raise _wrong("input_output", "it has no inputs and outputs that are lists of one length")
    return list(zip(inputs, outputs, strict=True))


def _case(given: Any, expected: Any) -> Case:
    return Case(_text(given), _text(expected))


def _call(name: str, given: Any, expected: Any, wrapped: bool) -> Call:
    """LiveCodeBench stores text: a JSON value a line as arguments, and one as the result. APPS may wrap results in
    lists.

    wrapped: a list of one item may be a wrapped result, since no result of the row is a list of another length.
    """
    if isinstance(given, str):
        given = [_parsed(line, "tests") for line in given.splitlines() if line.strip()]
        return Call(name, given, [_parsed(expected, "tests") if isinstance(expected, str) else expected])
    if not isinstance(given, list):
        raise _wrong("tests", f"the input of {name} is not a list of arguments")
    return Call(name, given, [expected, *(expected if wrapped and isinstance(expected, list) else [])])


def _text(value: Any) -> str:
    """A text; APPS has lists of lines in some places."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parsed(value: Any, key: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise _wrong(key, f"it is not JSON: {error}") from error


def _wrong(key: str, reason: str) -> DataError:
    return DataError(reason, where=f"metadata.{key} of the row", remedy=REMEDY)
