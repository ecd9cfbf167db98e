"""Task records are plain dictionaries, and `mismatches` notices what is not as their types say."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

from millrace.core.contracts.task_records import IterationRecords, StepMetrics

TYPES = get_type_hints(IterationRecords)
FILTERED: dict[str, Any] = {
    "files": [{"path": "batch.parquet", "sha256": "a", "size": 1, "rows": 8, "table": "batch"}],
    "verdicts": {"kept": 8},
    "groups_kept": 8,
    "groups_dropped": 0,
    "groups_returned": 0,
    "groups_zero_variance": 1,
    "dropped_by_kind": {},
}
OPEN = {StepMetrics}  # algorithms add metrics of their own


def mismatches(value: Any, hint: Any, where: str) -> list[str]:
    """Where a value from JSON is not as its type says."""
    if is_typeddict(hint):
        marked = get_type_hints(hint, include_extras=True)
        required = {name for name, each in marked.items() if get_origin(each) is not NotRequired}
        hints = get_type_hints(hint)
        missing = [f"{where}.{name} is missing" for name in sorted(required - set(value))]
        if hint not in OPEN:
            missing += [f"{where}.{name} is in no type" for name in sorted(set(value) - set(hints))]
        inner = [
            mismatches(value[name], each, f"{where}.{name}") for name, each in hints.items() if name in value
        ]
        return missing + sum(inner, [])
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return sum((mismatches(each, arguments[0], where) for each in value), [])
    if origin is dict:
        return sum((mismatches(each, arguments[1], f"{where}.{name}") for name, each in value.items()), [])
    if hint is Any:  # a configuration: its own types say what it holds
        return []
    allowed = arguments if origin is UnionType else (hint,)
    assert all(each in (str, int, float, NoneType) for each in allowed), hint
    fits = isinstance(value, allowed) or (float in allowed and isinstance(value, int))
    return [] if fits else [f"{where} is {value!r}, not {hint}"]


def test_a_missing_and_a_strange_key_and_another_type_are_noticed() -> None:
    assert mismatches(FILTERED, TYPES["filter"], "filter") == []
    record = {**FILTERED, "groups_kept": "8", "groups": 1, "files": [{**FILTERED["files"][0], "size": None}]}
    del record["groups_dropped"]
    assert mismatches(record, TYPES["filter"], "filter") == [
        "filter.groups_dropped is missing",
        "filter.groups is in no type",
        "filter.files.size is None, not <class 'int'>",
        "filter.groups_kept is '8', not <class 'int'>",
    ]


def test_every_record_is_a_plain_dictionary() -> None:
    """Prefect stores an object of a class under its module's name, from which it could never move."""
    assert all(is_typeddict(hint) for hint in TYPES.values())
