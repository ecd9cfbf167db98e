"""Task records: what releases have stored is what the types say, so that a run goes on under the next release."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from millrace.core.contracts.task_records import IterationRecords, StepMetrics

STORED: dict[str, Any] = json.loads((Path(__file__).parent / "stored_records.json").read_text())
TYPES = get_type_hints(IterationRecords)
SUPERVISED = {"sample_supervised", "held_out_loss", "held_out_loss_before"}  # of which no release is kept
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


@pytest.mark.parametrize("task", sorted(set(TYPES) - SUPERVISED))
def test_a_record_of_an_earlier_release_is_as_its_type_says(task: str) -> None:
    assert mismatches(STORED[task], TYPES[task], task) == []


def test_a_renamed_key_and_a_changed_type_are_noticed() -> None:
    record = {**STORED["filter"], "groups_kept": "8", "groups": 1}
    del record["groups_dropped"]
    assert mismatches(record, TYPES["filter"], "filter") == [
        "filter.groups_dropped is missing",
        "filter.groups is in no type",
        "filter.groups_kept is '8', not <class 'int'>",
    ]


def test_a_step_with_its_settings_is_as_its_type_says() -> None:
    record = json.loads(json.dumps(STORED["train_step"]))
    for step in record["steps"]:
        step["settings"] = {"configuration": {"algorithm": {"kl_coef": 0.1}}, "numerics": {"device": "cpu"}}
    assert mismatches(record, TYPES["train_step"], "train_step") == []
    del record["steps"][0]["settings"]["numerics"]
    assert mismatches(record, TYPES["train_step"], "train_step") == [
        "train_step.steps.settings.numerics is missing"
    ]


def test_every_record_is_a_plain_dictionary() -> None:
    """Prefect stores an object of a class under its module's name, from which it could never move."""
    assert all(is_typeddict(hint) for hint in TYPES.values())
