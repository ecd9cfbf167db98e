"""The rules about the names of test files and classes, just within and just beyond them."""

from __future__ import annotations

import pytest

from tests.house.names import equal_class_names, equal_test_names
from tests.house.source import SourceFile


def _files(*paths: str) -> list[SourceFile]:
    return [SourceFile(path, "") for path in paths]


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


TWICE = {
    "in two layers": ({"core/plan.py": "class Plan: ...", "flows/plan.py": "class Plan: ..."}, 1),
    "in three files": (dict.fromkeys(("core/a.py", "tasks/b.py", "flows/c.py"), "class Plan: ..."), 2),
    "private": (dict.fromkeys(("core/a.py", "core/b.py"), "class _Plan: ..."), 0),
    "inside another": ({"core/a.py": "class Plan: ...", "core/b.py": "class Other:\n    class Plan: ..."}, 0),
    "in tests": ({"core/a.py": "class Plan: ...", "tests/core/test_a.py": "class Plan: ..."}, 0),
    "imported": ({"core/a.py": "class Plan: ...", "core/b.py": "from millrace.core.a import Plan"}, 0),
}


@pytest.mark.parametrize("case", TWICE)
def test_public_classes_of_one_name_are_reported(case: str) -> None:
    texts, reported = TWICE[case]
    found = list(equal_class_names(SourceFile(path, text) for path, text in texts.items()))
    assert len(found) == reported
    assert all("class Plan is also in core/" in violation.problem for violation in found)
