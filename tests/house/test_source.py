"""What the rules see of a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.source import SourceFile, read_source

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("core/accounts/ledger.py", "millrace.core.accounts.ledger"),
        ("core/config/__init__.py", "millrace.core.config"),
        ("src/millrace/__init__.py", "millrace"),
        ("tests/house/source.py", "tests.house.source"),
        ("benchmarks/gpu/sync.py", "benchmarks.gpu.sync"),
    ],
)
def test_a_file_is_known_by_the_name_it_is_imported_by(path: str, module: str) -> None:
    assert SourceFile(path, "").module == module


def test_each_file_of_the_checkout_is_read_once() -> None:
    files = [file.path for file in read_source(ROOT)]
    assert len(files) == len(set(files))
    assert {
        "core/accounts/ledger.py",
        "tasks/rollout.py",
        "src/millrace/__init__.py",
        "tests/conftest.py",
    } <= set(files)
    assert not [path for path in files if path.startswith("src/millrace/core/")]
