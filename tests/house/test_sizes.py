"""The rules about size, just within and just beyond each limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.house.sizes import large_classes, large_folders, long_files, long_functions
from tests.house.source import SourceFile, Violation

Rule = Callable[[Iterable[SourceFile]], Iterator[Violation]]


def _class(public: int) -> str:
    methods = [f"    def m{number}(self): ..." for number in range(public)]
    return "\n".join(["class A:", *methods, "    def _private(self): ...", "    def __len__(self): ..."])


def _property_class(public: int) -> str:
    return (
        _class(public - 1)
        + "\n    @property\n    def size(self): ...\n    @size.setter\n    def size(self, to): ..."
    )


def _function(lines: int) -> str:
    return "async def f():\n" + "    x = 1\n" * (lines - 1)


def _lines(count: int) -> str:
    return "x = 1\n" * count


LIMITS: dict[str, tuple[Rule, Callable[[int], str], int]] = {
    "public methods": (large_classes, _class, 15),
    "public methods and properties": (large_classes, _property_class, 15),
    "lines of a file": (long_files, _lines, 500),
    "lines of a function": (long_functions, _function, 80),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_passes_and_one_more_is_reported(name: str) -> None:
    rule, write, limit = LIMITS[name]
    assert not list(rule([SourceFile("core/x.py", write(limit))]))
    (found,) = rule([SourceFile("core/x.py", write(limit + 1))])
    assert found.path == "core/x.py"
    assert f"more than {limit}" in found.problem


def test_a_folder_holds_fifteen_modules_beside_its_init_and_not_sixteen() -> None:
    init = SourceFile("core/__init__.py", "")
    modules = [SourceFile(f"core/m{number}.py", "") for number in range(16)]
    deeper = SourceFile("core/config/run.py", "")
    assert not list(large_folders([init, deeper, *modules[:15]]))
    (found,) = large_folders([init, deeper, *modules])
    assert (found.path, found.problem) == ("core", "16 modules side by side, more than 15")


@pytest.mark.parametrize(("rule", "text"), [(large_classes, _class(30)), (long_files, _lines(900))])
def test_tests_may_hold_large_classes_and_files(rule: Rule, text: str) -> None:
    assert not list(rule([SourceFile("tests/test_x.py", text)]))


def test_tests_may_lie_side_by_side() -> None:
    assert not list(large_folders(SourceFile(f"tests/test_{n}.py", "") for n in range(30)))
