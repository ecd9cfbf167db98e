"""The rule against methods called by a string, on snippets."""

from __future__ import annotations

import pytest

from tests.house.actor_calls import string_calls
from tests.house.source import SourceFile

FORBIDDEN = (
    'await group.call("train", 3)',
    'group.call(f"train_{kind}", 3)',
    'group.call("save" if last else "upload", url)',
    'self._call("train")',
    'engine.rpc("resume")',
    'operator.methodcaller("train")(rank)',
    "getattr(rank, name)(3)",
    'getattr(rank, "train").remote(3)',
    'getattr(rank, "train").options(num_returns=2).remote(3)',
)
ALLOWED = (
    "await trainer.train(3)",
    "rank.train.remote(3)",
    "actor.call(Rank.train, 3)",
    "task.call(batch)",
    'value = getattr(settings, "limit")',
    'getattr(settings, "limit").bit_length()',
    'subprocess.call(["ls"])',
    'print("train")',
)


@pytest.mark.parametrize("snippet", FORBIDDEN)
def test_a_method_called_by_a_string_is_reported_with_its_line(snippet: str) -> None:
    (found,) = string_calls([_file(snippet)])
    assert (found.path, found.line) == ("tasks/x.py", 2)
    assert "by a string" in found.problem
    assert "Protocol" in found.remedy


@pytest.mark.parametrize("snippet", ALLOWED)
def test_other_calls_are_left_alone(snippet: str) -> None:
    assert not list(string_calls([_file(snippet)]))


def test_tests_may_call_by_name() -> None:
    assert not list(string_calls([_file('getattr(rank, name)(3); place.call("verify")', "tests/x.py")]))


def _file(statement: str, path: str = "tasks/x.py") -> SourceFile:
    return SourceFile(path, f"async def act():\n    {statement}\n")
