"""The rule about the names of test files, just within and just beyond it."""

from __future__ import annotations

from tests.house.names import equal_test_names
from tests.house.source import SourceFile


def _files(*paths: str) -> list[SourceFile]:
    return [SourceFile.parse(path, "") for path in paths]


def test_two_test_files_of_one_name_are_reported_since_pytest_imports_only_the_first() -> None:
    (found,) = equal_test_names(_files("tests/core/test_parts.py", "tests/flows/test_parts.py"))
    assert (found.path, found.problem) == (
        "tests/flows/test_parts.py",
        "named like tests/core/test_parts.py",
    )


def test_packages_tell_their_test_files_apart() -> None:
    inits = _files("tests/soak/__init__.py", "tests/house/__init__.py")
    assert not list(
        equal_test_names(
            [*inits, *_files("tests/soak/test_a.py", "tests/house/test_a.py", "tests/core/test_a.py")]
        )
    )


def test_modules_beside_tests_and_sources_may_share_a_name() -> None:
    assert not list(equal_test_names(_files("core/plan.py", "flows/plan.py", "tests/core/test_plan.py")))
